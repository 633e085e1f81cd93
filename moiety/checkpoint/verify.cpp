#include "moiety/checkpoint/verify.h"

#include <algorithm>
#include <optional>

#include "moiety/base/crc32c.h"
#include "moiety/checkpoint/checkpoint_error.h"
#include "moiety/checkpoint/json.h"

namespace moiety::checkpoint {
namespace {

// Throws if a slot's pieces in the rank files are not those of the manifest.
void compare_pieces(const std::string& path, const Manifest& saved, const std::string& key,
                    const SlotEntry& expected, const SlotEntry& found) {
  for (const Piece& p : expected.pieces) {
    const auto same_place = [&](const Piece& q) {
      return q.file == p.file && q.box == p.box && q.begin == p.begin && q.end == p.end;
    };
    const std::string& file = saved.files[static_cast<size_t>(p.file)].name;
    const auto at = std::find_if(found.pieces.begin(), found.pieces.end(), same_place);
    if (at == found.pieces.end()) {
      refuse("{}/{}: {} is not at bytes [{}, {}), where the manifest has it", path, file,
             json_string(key), p.begin, p.end);
    }
    if (at->crc32c != p.crc32c) {
      refuse("{}/{}: {} has crc32c {:08x} at bytes [{}, {}) of the data, expected {:08x}", path,
             file, json_string(key), at->crc32c, p.begin, p.end, p.crc32c);
    }
  }
  if (found.digest != expected.digest) {
    refuse("{}: {} has digest {:016x}, expected {:016x}", path, json_string(key), found.digest,
           expected.digest);
  }
}

// Throws a CheckpointError that names the first difference of what the rank files hold.
void compare(const std::string& path, const Manifest& saved, const Manifest& found) {
  if (saved == found) return;
  for (const auto& [name, tensor] : saved.tensors) {
    for (const auto& [slot, expected] : tensor.slots) {
      const std::string key = slot + "/" + name;
      const auto at = found.tensors.find(name);
      const bool is_there = at != found.tensors.end() && at->second.slots.contains(slot);
      if (!is_there) refuse("{}: {} is in no rank file", path, json_string(key));
      compare_pieces(path, saved, key, expected, at->second.slots.at(slot));
    }
  }
  for (const FileEntry& file : saved.files) {
    if (std::find(found.files.begin(), found.files.end(), file) != found.files.end()) continue;
    refuse("{}/{} does not have crc32c {:08x} and {} bytes", path, file.name, file.crc32c,
           file.bytes);
  }
  refuse("{}: the rank files are of another state than the manifest", path);
}

// What is left of a checkpoint's own files; empty where they are damaged.
struct Remains {
  std::string commit;                // COMMIT, whatever it holds
  std::optional<Manifest> manifest;  // manifest.json, if it can be read
  bool agree = false;                // COMMIT is that of manifest.json
};

Remains remains(const std::string& path, FileSystem& files) {
  constexpr uint64_t kLongestCommit = 4096;
  Remains left;
  try {
    left.commit = read_text(files, path + "/COMMIT", kLongestCommit);
  } catch (const CheckpointError&) {
  }
  try {
    const std::string json = read_text(files, path + "/manifest.json", kLongestManifest);
    left.manifest = parse_manifest(json, path + "/manifest.json");
    left.agree = left.commit == encode_commit(*left.manifest, json);
  } catch (const CheckpointError&) {
  }
  return left;
}

void replace_text(const std::string& path, std::string_view bytes, FileSystem& files) {
  write_text(files, path + ".tmp", bytes);
  rename(files, path + ".tmp", path);
}

}  // namespace

Manifest verify(const std::string& path, FileSystem& files) {
  const Manifest saved = read_manifest(path, files);
  compare(path, saved, rebuild_manifest(path, files));
  return saved;
}

Repair repair(const std::string& path, FileSystem& files) {
  const Remains left = remains(path, files);
  const Manifest found = rebuild_manifest(path, files);
  if (left.manifest && left.manifest != found) compare(path, *left.manifest, found);
  if (left.agree) return Repair::kNone;
  const std::string json = encode_manifest(found);
  const std::string commit = encode_commit(found, json);
  // A COMMIT has the manifest's checksum, and so that of all data.
  const bool is_whole = left.commit.size() == commit.size() &&
                        left.commit.starts_with("moiety-checkpoint ") &&
                        left.commit.ends_with('\n');
  if (!left.manifest && is_whole && left.commit != commit) {
    refuse("{}: the rank files are not what was saved: COMMIT is {}, by the rank files {}", path,
           json_string(left.commit), json_string(commit));
  }
  replace_text(path + "/manifest.json", json, files);
  replace_text(path + "/COMMIT", commit, files);
  sync_directory(files, path);
  return left.manifest || left.commit == commit ? Repair::kProved : Repair::kUnproved;
}

}  // namespace moiety::checkpoint
