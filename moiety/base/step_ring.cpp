#include "moiety/base/step_ring.h"

#include <cstring>

#include "moiety/base/cuda_built.h"

namespace moiety {
StepRing::StepRing(int64_t bytes, int64_t slots, Device device, const char* what)
    : bytes_(bytes),
      stride_(padded_bytes(bytes)),
      slots_(slots),
      host_(Buffer::host_for(device, slots * stride_, what)),
      count_(sizeof(uint64_t), device, what) {}

void StepRing::move(std::byte* block, bool inbound, const Stream& stream) {
  const detail::RingCopy c{.ring = host_.data(),
                           .block = block,
                           .count = reinterpret_cast<uint64_t*>(count_.data()),
                           .bytes = bytes_,
                           .stride = stride_,
                           .slots = slots_,
                           .inbound = inbound};
  if (stream.device().type == DeviceType::kCuda) {
    if constexpr (kCudaBuilt) return detail::copy_ring_cuda(c, stream);
    fail_without_cuda("step ring");
  }
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
