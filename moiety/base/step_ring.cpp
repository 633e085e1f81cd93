#include "moiety/base/step_ring.h"

#include <cstring>

namespace moiety {
namespace {

int64_t padded(int64_t bytes) { return (bytes + 63) / 64 * 64; }

Buffer host_memory(int64_t bytes, Device device, const char* what) {
  return device.type == DeviceType::kCuda ? Buffer::pinned(bytes, what) : Buffer(bytes, what);
}

}  // namespace

StepRing::StepRing(int64_t bytes, int64_t slots, Device device, const char* what)
    : bytes_(bytes),
      stride_(padded(bytes)),
      slots_(slots),
      host_(host_memory(slots * stride_, device, what)),
      count_(sizeof(uint64_t), device, what) {}

void StepRing::move(std::byte* block, bool inbound, const Stream& stream) {
  const detail::RingCopy c{.ring = host_.data(),
                           .block = block,
                           .count = reinterpret_cast<uint64_t*>(count_.data()),
                           .bytes = bytes_,
                           .stride = stride_,
                           .slots = slots_,
                           .inbound = inbound};
  if (stream.device().type == DeviceType::kCuda) return detail::copy_ring_cuda(c, stream);
  stream.run([=] {
    std::byte* slot = c.ring + static_cast<int64_t>(*c.count % uint64_t(c.slots)) * c.stride;
    c.inbound ? std::memcpy(c.block, slot, c.bytes) : std::memcpy(slot, c.block, c.bytes);
    ++*c.count;
  });
}

void OutboundRing::store(TensorView block, const Stream& stream) {
  check_tensor("store", "block", block, DType::kUInt8, {bytes_});
  check_device("store", "block", block, stream);
  move(static_cast<std::byte*>(block.raw()), false, stream);
}

}  // namespace moiety
