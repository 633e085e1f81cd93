#include "moiety/checkpoint/whole_directory.h"

#include <fcntl.h>
#include <filesystem>
#include <vector>

#include "moiety/base/error.h"
#include "moiety/base/log.h"
#include "moiety/checkpoint/together.h"

namespace moiety::checkpoint {
namespace {

namespace fs = std::filesystem;

// Throws unless `out` may be made, or replaced.
void check_free(const char* operation, const std::string& out, bool replace) {
  std::error_code none;
  const fs::file_status status = fs::status(out, none);
  if (!fs::exists(status)) return;
  if (!fs::is_directory(status)) throw UsageError("{}: {}: is there already", operation, out);
  if (!replace) {
    if (!fs::is_empty(out)) throw UsageError("{}: {}: is there already", operation, out);
    return;
  }
  // Only files are ever removed.
  for (const auto& entry : fs::directory_iterator(out)) {
    if (entry.is_directory() && !entry.is_symlink()) {
      throw UsageError("{}: {}: holds a directory, {}, which would be lost", operation, out,
                       entry.path().filename().string());
    }
  }
}

// Gives `temporary` the name `out`; what had it goes.
void take_name(const std::string& temporary, const std::string& out, bool replace,
               FileSystem& files) {
  std::error_code none;
  if (!replace || !fs::exists(out, none)) return rename(files, temporary, out);
  const std::string old = temporary + ".old";
  rename(files, out, old);
  try {
    rename(files, temporary, out);
  } catch (...) {
    rename(files, old, out);
    throw;
  }
  remove(files, old);
}

}  // namespace

void make_whole_directory(const char* operation, const std::string& given, bool replace,
                          FileSystem& files,
                          const std::function<void(const std::string& directory)>& body) {
  const std::string out = given.substr(0, given.find_last_not_of('/') + 1);
  if (out.empty()) throw UsageError("{}: {}: is there already", operation, given);
  check_free(operation, out, replace);
  const std::string temporary = out + ".tmp-" + random_id().substr(0, 8);
  make_directory(files, temporary);
  try {
    body(temporary);
    sync_directory(files, temporary);
    take_name(temporary, out, replace, files);
  } catch (...) {
    const std::string left = report_of([&] { remove(files, temporary); });
    if (!left.empty()) log(LogLevel::kWarning, "{}: {}", operation, left.substr(1));
    throw;
  }
  const std::string parent = fs::path(out).parent_path().string();
  sync_directory(files, parent.empty() ? "." : parent);
}

Manifest write_single_file(const std::string& directory, const Manifest& head, const FilePlan& plan,
                           const StateView& view, const std::vector<data::TokenizerFile>& tokenizer,
                           FileSystem& files,
                           const std::function<void(const File&, std::span<PieceSums>)>& fill) {
  const std::string name = rank_file_name(0, 1), path = directory + "/" + name;
  std::vector<PieceSums> sums(plan.pieces.size());
  {
    File file(files, path, O_WRONLY | O_CREAT | O_EXCL);
    file.allocate(plan.bytes());
    file.write(0, plan.header);
    fill(file, sums);
    file.sync_data();
    file.close();
  }
  Manifest manifest = head;
  merge(manifest, manifest_of_file(name, plan, view, sums), path);
  const uint32_t crc = manifest.files[0].crc32c;
  if (const uint32_t got = checksum(files, path); got != crc) {
    fail(ErrorKind::kIo, "{} reads back with crc32c {:08x}, written was {:08x}", path, got, crc);
  }
  const std::string json = encode_manifest(manifest);
  for (const data::TokenizerFile& f : tokenizer) {
    write_text(files, directory + "/" + f.name, f.bytes);
  }
  write_text(files, directory + "/manifest.json", json);
  write_text(files, directory + "/COMMIT", encode_commit(manifest, json));
  return manifest;
}

}  // namespace moiety::checkpoint
