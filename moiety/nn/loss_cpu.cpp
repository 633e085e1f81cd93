// The fast path of cross-entropy: the reference's arithmetic with one exponential per logit, kept
// in scratch; rows are spread over the cores.
#include <algorithm>
#include <limits>

#include "moiety/base/math.h"
#include "moiety/base/parallel.h"
#include "moiety/base/simd.h"
#include "moiety/nn/element.h"
#include "moiety/nn/loss.h"
#include "moiety/nn/loss_rows.h"
#include "moiety/nn/scratch.h"

namespace moiety::nn {
namespace {

template <class T>
MOIETY_INLINE void gradient(const float* e, int64_t n, float factor, int64_t target, T* dz) {
  const float at_target = target >= 0 && target < n ? e[target] : 0;
  for (int64_t v = 0; v < n; ++v) dz[v] = static_cast<T>(factor * e[v]);
  if (target >= 0 && target < n) dz[target] = static_cast<T>(factor * at_target - 1);
}

}  // namespace

MOIETY_SIMD_CLONES float row_max(const float* z, int64_t n) {
  constexpr int kLanes = 32;
  float lane[kLanes];
  for (float& x : lane) x = -std::numeric_limits<float>::infinity();
  int64_t v = 0;
  for (; v + kLanes <= n; v += kLanes) {
    for (int l = 0; l < kLanes; ++l) lane[l] = z[v + l] > lane[l] ? z[v + l] : lane[l];
  }
  for (; v < n; ++v) lane[0] = z[v] > lane[0] ? z[v] : lane[0];
  float max = lane[0];
  for (const float x : lane) max = x > max ? x : max;
  return max;
}

MOIETY_SIMD_CLONES float row_exponentials(const float* z, int64_t n, float max, float* e) {
  for (int64_t i = 0; i < n; ++i) e[i] = exp_nonpositive(z[i] - max);
  return loss_sum<float>(
      n, [&](float partial, int64_t i) __attribute__((always_inline)) { return partial + e[i]; });
}

MOIETY_SIMD_CLONES void row_gradient(const float* e, int64_t n, float factor, int64_t target,
                                     void* dz, DType dtype) {
  if (dtype == DType::kBFloat16) {
    gradient(e, n, factor, target, static_cast<bf16*>(dz));
  } else {
    gradient(e, n, factor, target, static_cast<float*>(dz));
  }
}

namespace {

float row_loss(const CrossEntropyArgs& a, int64_t n, int32_t target, void* dz) {
  const float* z = a.logits_NV.data<float>() + n * a.logits_NV.stride(0);
  const int64_t vocabulary = a.logits_NV.size(1);
  float* e = thread_scratch<float>(vocabulary);
  const float max = row_max(z, vocabulary), sum = row_exponentials(z, vocabulary, max, e);
  const float lse = max + log(sum);
  const float loss = lse - z[target];
  const float factor = (1 + 2 * a.z_coef * lse) * (1 / sum);
  if (dz) row_gradient(e, vocabulary, factor, target, dz, a.dlogits_NV.dtype());
  return loss;
}

}  // namespace

void cross_entropy_cpu(const CrossEntropyArgs& a) {
  const TensorView& dz = a.dlogits_NV;
  parallel_for(a.logits_NV.size(0), 16, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const int32_t target = a.target_N.data<int32_t>()[n];
      const bool masked = a.mask_N.defined() && a.mask_N.data<uint8_t>()[n] == 0;
      std::byte* dz_row = nullptr;
      if (dz.defined()) {
        dz_row = static_cast<std::byte*>(dz.raw()) + byte_size(dz.dtype(), n * dz.stride(0));
      }
      if (masked || target == kIgnoredTarget) {
        a.loss_N.data<float>()[n] = 0;
        if (dz_row) std::fill_n(dz_row, byte_size(dz.dtype(), a.logits_NV.size(1)), std::byte{0});
      } else {
        a.loss_N.data<float>()[n] = row_loss(a, n, target, dz_row);
      }
    }
  });
}

}  // namespace moiety::nn
