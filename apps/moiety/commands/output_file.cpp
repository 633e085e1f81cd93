#include "apps/moiety/commands/output_file.h"

#include <filesystem>

#include "moiety/base/error.h"

namespace moiety::app {

void check_free_file(const std::string& path, bool overwrite) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (fs::is_directory(status)) throw UsageError("{}: is a directory", path);
  if (overwrite || status.type() == fs::file_type::not_found) return;
  if (error) throw IoError("{}: {}", path, error.message());
  if (fs::is_regular_file(status)) {
    throw UsageError("{}: is there already; --force overwrites", path);
  }
}

}  // namespace moiety::app
