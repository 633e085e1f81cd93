// Files that are replaced as a whole.
#pragma once

#include <filesystem>
#include <string_view>

namespace moiety {

// Readers see the old bytes or the new ones (with `more` behind them), whole. A link stays, and what
// it names is replaced; a device or a FIFO stays and is written into. Throws IoError.
void replace_file(const std::filesystem::path& path, std::string_view bytes,
                  std::string_view more = {});

}  // namespace moiety
