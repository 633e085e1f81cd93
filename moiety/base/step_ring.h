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

// What both directions have: the slots, and the device's counter.
class StepRing {
 public:
  // Block n, n = 0, 1, ..., on the host.
  std::byte* slot(int64_t n) const { return host_.data() + n % slots_ * stride_; }

 protected:
  StepRing(int64_t bytes, int64_t slots, Device device, const char* what);
  // Between `block` and the device's next slot.
  void move(std::byte* block, bool inbound, const Stream& stream);

  int64_t bytes_, stride_;

 private:
  int64_t slots_;
  Buffer host_, count_;
};

// Host to device: the host writes the slots.
class InboundRing : public StepRing {
 public:
  // Blocks of `bytes` bytes.
  InboundRing(int64_t bytes, int64_t slots, Device device, const char* what)
      : StepRing(bytes, slots, device, what), block_(stride_, device, what) {}

  // block() := the next block.
  void fetch(const Stream& stream) { move(block_.data(), true, stream); }
  TensorView block() const { return block_.view(DType::kUInt8, {bytes_}); }

 private:
  Buffer block_;
};

// Device to host: the host reads the slots.
class OutboundRing : public StepRing {
 public:
  OutboundRing(int64_t bytes, int64_t slots, Device device, const char* what)
      : StepRing(bytes, slots, device, what) {}

  // The next block := `block`, uint8 [bytes] on the device.
  void store(TensorView block, const Stream& stream);
};

namespace detail {
// `bytes` bytes between `block` and slot count mod slots, `stride` bytes apart; ++count. All is in
// the reach of the stream's device.
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
