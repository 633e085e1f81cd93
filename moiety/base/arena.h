// Memory for activations and workspace, allocated and released like a stack: last in, first out.
//
// The first step finds out how much memory is needed, and takes it in chunks. `settle` then makes
// one block of the peak, after which the same sequence of calls gives the same addresses, so that a
// step can be captured. A later step that needs more grows the arena again, and the next `settle`
// returns true.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "moiety/base/buffer.h"

namespace moiety {

class Arena {
 public:
  explicit Arena(std::string name, int64_t chunk_bytes = int64_t{16} << 20)
      : Arena(std::move(name), Device{}, chunk_bytes) {}
  Arena(std::string name, Device device, int64_t chunk_bytes = int64_t{16} << 20)
      : name_(std::move(name)), device_(device), chunk_bytes_(chunk_bytes) {}
  // An arena in memory of the caller's, uint8 [bytes], that begins where tensors may: it never takes
  // memory of its own, and throws where this does not suffice.
  Arena(std::string name, const TensorView& memory);

  Device device() const { return device_; }

  // Memory of `bytes` bytes, aligned to 64 on a CPU and to 256 on a GPU; its contents are
  // unspecified. Zero bytes give a unique legal pointer.
  std::byte* allocate(int64_t bytes);
  TensorView tensor(DType dtype, std::initializer_list<int64_t> sizes);

  // Lends memory of another kind, such as that which peers map, to tensors that ask for it; empty
  // memory ends that. Called between steps, with nothing in use.
  void lend(std::span<std::byte> memory);
  // The same as `tensor`, in lent memory as long as there is room.
  TensorView lent_tensor(DType dtype, std::initializer_list<int64_t> sizes);

  // Everything allocated after `mark` is given back by `release(mark)`.
  struct Mark {
    size_t chunk = 0;
    int64_t used = 0;
    int64_t in_use = 0;
    int64_t lent = 0;
  };
  Mark mark() const;
  void release(const Mark& mark);

  // Folds the chunks into one block of the peak size and returns whether addresses have changed.
  // Called between steps, with nothing in use.
  bool settle();

  int64_t in_use() const { return in_use_; }
  int64_t peak() const { return peak_; }
  int64_t reserved() const;

 private:
  int64_t alignment() const { return device_.type == DeviceType::kCuda ? 256 : 64; }
  Buffer chunk(int64_t bytes) const { return Buffer(bytes, device_, name_.c_str()); }

  std::string name_;
  Device device_;
  int64_t chunk_bytes_;
  std::vector<Buffer> chunks_;
  size_t chunk_ = 0;    // the chunk that is being filled
  int64_t used_ = 0;    // bytes used of that chunk
  int64_t in_use_ = 0;  // bytes over all chunks, gaps at chunk ends not counted
  int64_t peak_ = 0;
  std::span<std::byte> lent_;
  int64_t lent_used_ = 0;
  bool given_ = false;  // memory_ is all there is
  std::span<std::byte> memory_;
};

// Releases at its end what was allocated since its beginning.
class ArenaScope {
 public:
  explicit ArenaScope(Arena& arena) : arena_(arena), mark_(arena.mark()) {}
  ~ArenaScope() { arena_.release(mark_); }
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;

 private:
  Arena& arena_;
  Arena::Mark mark_;
};

}  // namespace moiety
