// The contents of a checkpoint: manifest.json, and the keys of the pieces in the rank files, from
// which a lost manifest can be made again.
//
//    step-00001000/rank-00000-of-00002.safetensors ...   manifest.json   COMMIT
//
// COMMIT is written last: "moiety-checkpoint 1 <id> <bytes of the manifest> <its crc32c>\n". A text
// that is wrong is a CheckpointError with file, byte offset and value. The version is 2, which older
// readers refuse, where experts are not plain (key_remap.h).
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "moiety/checkpoint/box.h"
#include "moiety/checkpoint/file_system.h"
#include "moiety/checkpoint/key_remap.h"
#include "moiety/checkpoint/safetensors.h"

namespace moiety::checkpoint {

struct RankLayout {
  int ranks = 1, tp = 1, gtp = 1, dp = 1, ep = 1, egtp = 1;
  friend bool operator==(const RankLayout&, const RankLayout&) = default;
};

// The training state beside the tensors.
struct RunState {
  int64_t step = 0;
  int64_t tokens = 0;
  uint64_t seed = 0;
  int64_t adam_t = 0;  // updates that were applied
  RankLayout layout;
  std::optional<double> validation_loss;  // of these weights, if they were evaluated; finite
  std::string config = "{}";              // JSON objects of the caller, kept byte for byte
  std::string state = "{}";
  ExpertLayout experts;  // names and row order of the experts' tensors
  friend bool operator==(const RunState&, const RunState&) = default;
};

struct Piece {
  int file = 0;  // index into Manifest::files
  Box box;
  uint64_t begin = 0, end = 0;  // bytes, relative to the data of the safetensors file
  uint32_t crc32c = 0;
  friend bool operator==(const Piece&, const Piece&) = default;
};

struct SlotEntry {
  DType dtype = DType::kFloat32;
  uint64_t digest = 0;
  std::vector<Piece> pieces;  // ordered by start, then file
  friend bool operator==(const SlotEntry&, const SlotEntry&) = default;
};

struct TensorEntry {
  std::vector<int64_t> shape;
  std::map<std::string, SlotEntry> slots;
  friend bool operator==(const TensorEntry&, const TensorEntry&) = default;
};

struct FileEntry {
  std::string name;
  uint64_t bytes = 0;
  uint32_t crc32c = 0;
  friend bool operator==(const FileEntry&, const FileEntry&) = default;
};

struct Manifest {
  std::string id;  // 32 hex digits
  RunState run;
  std::vector<FileEntry> files;
  std::map<std::string, TensorEntry> tensors;
  friend bool operator==(const Manifest&, const Manifest&) = default;
};

inline constexpr uint64_t kLongestManifest = uint64_t{1} << 30;  // bytes
Manifest parse_manifest(std::string_view json, const std::string& file = "manifest.json");
std::string encode_manifest(const Manifest& manifest);
// The run's state as rank 0's file holds it.
RunState parse_run(std::string_view json, const std::string& file);
// The entry of a tensor's slot, added if there was none. Throws CheckpointError naming `path` if it
// is there with another shape or type.
SlotEntry& slot_of(Manifest& manifest, const std::string& tensor, const std::string& slot,
                   const std::vector<int64_t>& shape, DType dtype,
                   const std::string& path = "checkpoint");
// Adds the files and pieces of `part`; digests add up. Throws as slot_of does.
void merge(Manifest& manifest, const Manifest& part, const std::string& path = "checkpoint");
// Throws CheckpointError naming `path`, tensor, slot and box unless the pieces of every tensor and
// slot cover it exactly once.
void check_tiling(const Manifest& manifest, const std::string& path = "checkpoint");

std::string encode_commit(const Manifest& manifest, std::string_view manifest_json);
// Reads a checkpoint's manifest and checks that COMMIT matches it, the pieces tile, and every file
// has its size.
Manifest read_manifest(const std::string& path, FileSystem& files = posix());
// Makes the manifest again from the rank files alone, all of whose data is read for it.
Manifest rebuild_manifest(const std::string& path, FileSystem& files = posix());

// A rank file's name: "rank-00000-of-00008.safetensors".
std::string rank_file_name(int rank, int ranks);
// A piece's key: "<slot>/<tensor>[<start>:<end>/<extent>,...]".
std::string piece_key(const std::string& slot, const std::string& tensor,
                      std::span<const int64_t> shape, const Box& box);
struct PieceName {
  std::string slot, tensor;
  std::vector<int64_t> shape;
  Box box;
};
// The parts of a key. Throws CheckpointError naming `file` if `key` is none.
PieceName parse_piece_key(const std::string& file, std::string_view key);
// The metadata of rank `rank`'s file. Rank 0's holds the run's state.
Metadata file_metadata(const Manifest& manifest, int rank);

}  // namespace moiety::checkpoint
