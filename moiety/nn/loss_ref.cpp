#include <limits>

#include "moiety/base/math.h"
#include "moiety/nn/element.h"
#include "moiety/nn/loss.h"
#include "moiety/nn/loss_rows.h"

namespace moiety::nn {
namespace {

// The loss of one row. T is the type of dlogits, which may share the row's memory: the gradient is
// written in ascending order and is never wider than a logit.
template <class T, class A = Compute<T>>
A row_loss(const A* z, int64_t vocabulary, int32_t target, A z_coef, T* dz) {
  A max = -std::numeric_limits<A>::infinity();
  for (int64_t v = 0; v < vocabulary; ++v) max = z[v] > max ? z[v] : max;
  const A sum = loss_sum<A>(
      vocabulary, [&](A partial, int64_t v) { return partial + exp_nonpositive(z[v] - max); });
  const A lse = max + log(sum);
  const A loss = lse - z[target];
  if (dz) {
    const A factor = (1 + 2 * z_coef * lse) * (1 / sum);
    for (int64_t v = 0; v < vocabulary; ++v) {
      const A p = factor * exp_nonpositive(z[v] - max);
      dz[v] = static_cast<T>(v == target ? p - 1 : p);
    }
  }
  return loss;
}

template <class T>
void rows(const CrossEntropyArgs& a) {
  using A = Compute<T>;
  const int64_t vocabulary = a.logits_NV.size(1);
  const TensorView& dz = a.dlogits_NV;
  for (int64_t n = 0; n < a.logits_NV.size(0); ++n) {
    const int32_t target = a.target_N.data<int32_t>()[n];
    const bool masked = a.mask_N.defined() && a.mask_N.data<uint8_t>()[n] == 0;
    T* dz_row = dz.defined() ? dz.data<T>() + n * dz.stride(0) : nullptr;
    if (masked || target == kIgnoredTarget) {
      a.loss_N.data<A>()[n] = 0;
      for (int64_t v = 0; dz_row && v < vocabulary; ++v) dz_row[v] = T(0);
      continue;
    }
    const A* z = a.logits_NV.data<A>() + n * a.logits_NV.stride(0);
    a.loss_N.data<A>()[n] = row_loss<T>(z, vocabulary, target, static_cast<A>(a.z_coef), dz_row);
  }
}

}  // namespace

void cross_entropy_ref(const CrossEntropyArgs& a) {
  const DType type = a.dlogits_NV.defined() ? a.dlogits_NV.dtype() : a.logits_NV.dtype();
  with_element(type, [&](auto element) { rows<decltype(element)>(a); });
}

}  // namespace moiety::nn
