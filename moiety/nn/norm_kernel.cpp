#include "moiety/nn/norm_kernel.h"

#include <algorithm>

namespace moiety::nn {

NormKernel choose_norm(const NormTraits& traits) {
  NormKernel out{NormFamily::kAny, traits.dtype, 256};
  if (!traits.octets) return out;
  for (const NormKernel& k : kNormKernels) {
    if (k.dtype != traits.dtype || k.family == NormFamily::kAny) continue;
    out = k;
    if (traits.columns <= k.columns) break;
  }
  return out;
}

NormKernel choose_norm_rope(const NormTraits& traits) {
  for (const NormKernel& k : kNormRopeKernels) {
    if (traits.octets && k.dtype == traits.dtype && k.columns == traits.columns) return k;
  }
  return {NormFamily::kAny, traits.dtype, 0};
}

NormRing norm_ring(const NormTraits& traits, int64_t shared_bytes) {
  constexpr int64_t kStage = 48 << 10;  // bytes of a stage, unless a row has more
  NormRing ring{.tensors = traits.addend ? 3 : 2};
  ring.row_bytes = ring.tensors * byte_size(traits.dtype, traits.columns);
  while (ring.log > 0 && ring.row_bytes << ring.log > kStage) --ring.log;
  const int64_t fit = shared_bytes / (ring.row_bytes << ring.log);
  ring.stages = static_cast<int>(std::min<int64_t>(fit, NormRing::kMostStages));
  return ring;
}

NormKernel choose_norm_backward(const NormTraits& traits, const NormRing& ring) {
  if (!traits.octets) return {NormFamily::kAny, traits.dtype, 0};
  for (const NormKernel& k : kNormBackwardKernels) {
    const bool can = (k.family == NormFamily::kShort && !traits.addend) ||
                     (k.family == NormFamily::kRing && ring.stages >= 2 && traits.columns > 256);
    if (can && k.dtype == traits.dtype && traits.columns <= k.columns) return k;
  }
  return {NormFamily::kLong, traits.dtype, 0};
}

}  // namespace moiety::nn
