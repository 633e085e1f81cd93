// The check of a file that a command is about to write.
#pragma once

#include <string>

namespace moiety::app {

// Throws UsageError if the path is a directory, or a file and not to be overwritten. A device or a
// FIFO loses nothing by being written into.
void check_free_file(const std::string& path, bool overwrite);

}  // namespace moiety::app
