// A ring of slots that carries blocks of bytes between host and device, one at a time and in order,
// without either side waiting for the other inside a step. The host uses slot n mod S of a ring in
// pinned memory; the device uses the slot that its own counter names. A captured step that is
// launched again therefore takes the next block.
//
// The ring knows nothing of time: a slot is the host's again when the device has passed block n,
// which the caller learns from an event. On a CPU the ring is plain memory.
#pragma once

#include <cstdint>

#include "moiety/base/buffer.h"
#include "moiety/base/stream.h"

namespace moiety {

// The part that both directions share: the slots, and the device's counter.
class StepRing {
 public:
  // The slot of block n, n = 0, 1, ..., on the host.
  std::byte* slot(int64_t n) const { return host_.data() + n % slots_ * stride_; }

 protected:
  StepRing(int64_t bytes, int64_t slots, Device device, const char* what);
  // Copies between `block` and the device's next slot.
  void move(std::byte* block, bool inbound, const Stream& stream);

  int64_t bytes_, stride_;

 private:
  int64_t slots_;
  Buffer host_, count_;
};

// A ring from host to device: the host writes the slots.
class InboundRing : public StepRing {
 public:
  // A ring of blocks of `bytes` bytes, of which the device holds the last `held`.
  InboundRing(int64_t bytes, int64_t slots, Device device, const char* what, int64_t held = 1)
      : StepRing(bytes, slots, device, what), blocks_(held * stride_, device, what), held_(held) {}

  // Puts the next block into block(), in place of the oldest one that is held.
  void fetch(const Stream& stream) {
    last_ = (last_ + 1) % held_;
    move(block_data(), true, stream);
  }
  TensorView block() const { return {block_data(), DType::kUInt8, {bytes_}, blocks_.device()}; }

 private:
  std::byte* block_data() const { return blocks_.data() + last_ * stride_; }

  Buffer blocks_;
  int64_t held_, last_ = 0;
};

// A ring from device to host: the host reads the slots.
class OutboundRing : public StepRing {
 public:
  OutboundRing(int64_t bytes, int64_t slots, Device device, const char* what)
      : StepRing(bytes, slots, device, what) {}

  // Stores `block`, uint8 [bytes] on the device, as the next block.
  void store(TensorView block, const Stream& stream);
};

namespace detail {
// One copy of `bytes` bytes between `block` and slot (count mod slots); slots are `stride` bytes
// apart. It adds 1 to count. The stream's device can reach all of the memory.
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
