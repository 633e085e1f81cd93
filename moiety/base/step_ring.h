// Blocks of bytes between host and device, one at a time and in order, without either waiting for
// the other inside a step: the host writes (reads) slot n mod S of a ring in pinned memory, the
// device reads (writes) the slot that a counter of its own says. So a captured step that is
// launched again takes the next block.
//
// The ring knows nothing of time: a slot is the host's again when the device's turn of n has
// passed, which an event says. On a CPU the same with plain memory.
#pragma once

#include <cstdint>

#include "moiety/base/buffer.h"
#include "moiety/base/stream.h"

namespace moiety {

// Host to device.
class InboundRing {
 public:
  // Blocks of `bytes` bytes.
  InboundRing(int64_t bytes, int64_t slots, Device device, const char* what);

  // Where the host writes block n, n = 0, 1, ...
  std::byte* slot(int64_t n) const { return host_.data() + n % slots_ * stride_; }
  // block() := the next block.
  void fetch(const Stream& stream);
  TensorView block() const { return block_.view(DType::kUInt8, {bytes_}); }

 private:
  int64_t bytes_, stride_, slots_;
  Buffer host_, block_, count_;
};

// Device to host.
class OutboundRing {
 public:
  OutboundRing(int64_t bytes, int64_t slots, Device device, const char* what);

  // The next block := `block`, uint8 [bytes] on the device.
  void store(TensorView block, const Stream& stream);
  // What the host reads of block n.
  std::byte* slot(int64_t n) const { return host_.data() + n % slots_ * stride_; }

 private:
  int64_t bytes_, stride_, slots_;
  Buffer host_, count_;
};

namespace detail {
// `bytes` bytes between `block` and slot count mod slots, `stride` bytes apart;
// ++count. All is in the reach of the stream's device.
struct RingCopy {
  std::byte* ring;
  std::byte* block;
  uint64_t* count;
  int64_t bytes, stride, slots;
  bool inbound;
};
void copy_ring_cuda(const RingCopy& copy, const Stream& stream);
}  // namespace detail

}  // namespace moiety
