// One rank's file of a checkpoint: its pieces, and their way to the disk.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "moiety/base/stream.h"
#include "moiety/checkpoint/manifest.h"
#include "moiety/checkpoint/staging.h"

namespace moiety::checkpoint {

// The places of a view's pieces in a file.
struct FilePlan {
  struct Piece {
    int of = 0;  // index into the view
    Box box;
    uint64_t begin = 0, end = 0;  // bytes of the data
    int64_t bytes() const { return static_cast<int64_t>(end - begin); }
  };
  std::vector<Piece> pieces;  // in the order of the file
  std::string header;
  uint64_t data_bytes = 0;

  uint64_t bytes() const { return header.size() + data_bytes; }
};
// Cuts a view into pieces of at most `piece_bytes` (or one index of the last dimension). Its memory
// is not looked at. Throws Error(kInvalidArgument) for a piece of the view that cannot be stored,
// naming it.
FilePlan plan_file(const StateView& view, const Metadata& metadata, int64_t piece_bytes);

struct PieceSums {
  uint32_t crc32c = 0;
  uint64_t digest = 0;
};
// Writes a piece of `of`, whose bytes are at `data`, to its place.
PieceSums write_piece(const File& file, const FilePlan& plan, const FilePlan::Piece& piece,
                      const StatePiece& of, const std::byte* data);
// The contents of a file whose pieces were written, as a manifest of one file.
Manifest manifest_of_file(const std::string& name, const FilePlan& plan, const StateView& view,
                          std::span<const PieceSums> sums);

class RankFile {
 public:
  // The file of the state that rank `rank` owns. `head` has id and run. Throws what plan_file throws.
  RankFile(StateView view, const Manifest& head, int rank, int64_t piece_bytes);

  uint64_t bytes() const { return plan_.bytes(); }
  uint64_t data_bytes() const { return plan_.data_bytes; }

  // Copies the pieces' elements to `memory`, of data_bytes(), and writes from there later. Elements
  // on a GPU are copied on `stream`, which is that GPU's and is waited for.
  void take_copy(std::byte* memory, const Stream& stream);

  // Writes the file into `directory`, where it must not exist, brings it to the disk and, with
  // `verify`, reads it back. Returns its contents as a manifest of one file. Throws Error(kIo),
  // also soon after `stop` has become true.
  Manifest write(const std::string& directory, bool verify, FileSystem& files,
                 const std::atomic<bool>& stop) const;
  const std::string& name() const { return name_; }

 private:
  struct Memory {
    const std::byte* data = nullptr;
    Device device{};
  };

  StateView view_;
  std::string id_;
  int64_t step_;
  std::string name_;
  FilePlan plan_;
  std::vector<Memory> memory_;  // by piece of the plan
};

}  // namespace moiety::checkpoint
