#include "apps/moiety/commands/path_kind.h"

#include <algorithm>
#include <filesystem>

#include "apps/moiety/commands/quantized_directory.h"
#include "moiety/base/error.h"
#include "moiety/checkpoint/file_system.h"
#include "moiety/checkpoint/retention.h"
#include "moiety/hf/folder.h"

namespace moiety::app {
namespace fs = std::filesystem;

PathKind kind_of_path(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) throw DataError("{}: no such file or directory", path);
  if (fs::is_regular_file(status)) return PathKind::kTokenFile;
  if (!fs::is_directory(status)) throw DataError("{}: neither a file nor a directory", path);
  if (is_quantized(path)) return PathKind::kQuantized;
  const std::vector<std::string> names = checkpoint::list(checkpoint::posix(), path);
  const auto has = [&](auto&& fits) { return std::any_of(names.begin(), names.end(), fits); };
  if (has([](const std::string& name) {
        return name == "COMMIT" || name == "manifest.json" || name.starts_with("rank-00000-of-");
      })) {
    return PathKind::kCheckpoint;
  }
  if (has([](const std::string& name) {
        return name == "checkpoints" || name == "metrics.jsonl" || checkpoint::step_of(name);
      })) {
    return PathKind::kRun;
  }
  if (hf::is_folder(path)) {
    throw DataError("{}: a Hugging Face folder, which `moiety import` makes a checkpoint of", path);
  }
  throw DataError("{}: neither a run, a checkpoint nor a quantized tensor", path);
}

}  // namespace moiety::app
