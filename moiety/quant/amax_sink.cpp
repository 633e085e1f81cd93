#include "moiety/quant/amax_sink.h"

#include <algorithm>
#include <atomic>

#include "moiety/base/error.h"
#include "moiety/quant/quantize/quantize_loops.h"

namespace moiety::quant {

void AmaxSink::check(const char* operation, DType stored, int64_t groups) const {
  if (!defined()) return;
  check_tensor(operation, "sink.amax", amax, DType::kFloat32, {groups});
  MOIETY_CHECK(amax.contiguous(), "{}: sink.amax is {}", operation, amax.describe());
  MOIETY_CHECK(stored == DType::kFloat32 || stored == DType::kBFloat16,
               "{}: an amax of {} is asked for, expected float32 or bfloat16", operation,
               name(stored));
}

void AmaxSink::clear() const {
  if (defined()) std::fill_n(amax.data<float>(), amax.numel(), 0.0f);
}

void AmaxSink::raise(int64_t group, uint32_t bits) const {
  raise_amax(amax.data<float>() + group, bits);
}

void AmaxSink::add(int64_t group, DType dtype, const void* x, int64_t n) const {
  raise(group, amax_bits(dtype, x, n));
}

uint32_t amax_bits(DType dtype, const void* x, int64_t n) { return loops::amax(dtype, x, n); }

void raise_amax(float* slot, uint32_t bits) {
  std::atomic_ref<uint32_t> held(*reinterpret_cast<uint32_t*>(slot));
  uint32_t seen = held.load(std::memory_order_relaxed);
  while (seen < bits && !held.compare_exchange_weak(seen, bits, std::memory_order_relaxed)) {
  }
}

}  // namespace moiety::quant
