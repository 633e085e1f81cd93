// Host memory through which state on a GPU comes and goes, one part after the other. State in host
// memory is used directly. For one host thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moiety/base/buffer.h"
#include "moiety/base/stream.h"
#include "moiety/checkpoint/box.h"

namespace moiety::checkpoint {

// Bytes of a part, where the caller may choose.
inline constexpr int64_t kStagingBytes = int64_t{16} << 20;

class Staging {
 public:
  // Memory of `bytes` bytes for data that goes to `device`: pinned for a GPU, unless the system
  // refuses. Its former contents are lost; copies from it have ended.
  std::byte* reserve(int64_t bytes, Device device);

  // The bytes at `data`, on `device`, as host memory that is good until the next call.
  const std::byte* fetch(const void* data, int64_t bytes, Device device);

  // Moves `region` from the reserved memory, which holds the box `from`, to the box of a piece. The
  // move has ended after `finish` at the latest.
  void put(const Box& region, const Box& from, const StatePiece& to);
  void finish() { stream_.synchronize(); }

 private:
  Buffer buffer_;
  Stream stream_;  // a stream of the GPU, once there was one
};

// The GPU on which pieces of the view lie; the CPU if none does. Throws Error(InvalidArgument) if
// they lie on several.
Device gpu_of(const char* operation, const StateView& view);

// The digest of a piece, wherever it lies (digest.h).
uint64_t digest(const StatePiece& piece, Staging& staging);

}  // namespace moiety::checkpoint
