// One rank's file of a checkpoint: its pieces, and their way to the disk.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "moiety/base/stream.h"
#include "moiety/checkpoint/manifest.h"
#include "moiety/checkpoint/staging.h"

namespace moiety::checkpoint {

class RankFile {
 public:
  // The file of the state that rank `rank` owns, cut into pieces of at most `piece_bytes` (or one
  // index of the last dimension). `head` has id and run. Throws Error(kInvalidArgument) for a piece
  // of the view that cannot be stored, naming it.
  RankFile(StateView view, const Manifest& head, int rank, int64_t piece_bytes);

  uint64_t bytes() const { return header_.size() + data_bytes_; }
  uint64_t data_bytes() const { return data_bytes_; }

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
  struct Piece {
    int of = 0;  // index into view_
    Box box;
    const std::byte* data = nullptr;
    Device device{};
    uint64_t begin = 0, end = 0;  // bytes of the data

    int64_t bytes() const { return static_cast<int64_t>(end - begin); }
  };
  struct Sums {
    uint32_t crc32c = 0;
    uint64_t digest = 0;
  };

  Sums write_piece(const File& file, const Piece& piece, Staging& staging,
                   const std::atomic<bool>& stop) const;

  StateView view_;
  std::string id_;
  int64_t step_;
  std::string name_;
  std::string header_;
  uint64_t data_bytes_ = 0;
  std::vector<Piece> pieces_;  // in the order of the file
};

}  // namespace moiety::checkpoint
