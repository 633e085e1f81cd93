#include "moiety/nn/element.h"
#include "moiety/nn/rope.h"

namespace moiety::nn {
namespace {

template <class T>
void rotate(const RopeArgs& a) {
  using A = Compute<T>;
  const TensorView& x = a.x_TGNC;
  const int64_t half = x.size(3) / 2;
  for (int64_t t = 0; t < x.size(0); ++t) {
    const int64_t position =
        a.position_T.defined() ? a.position_T.data<int32_t>()[t] : t % a.seq_len;
    const float* cosine = a.table.data<float>() + position * 2 * half;
    const float* sine = cosine + half;
    for (int64_t g = 0; g < x.size(1); ++g) {
      for (int64_t n = 0; n < x.size(2); ++n) {
        T* head = x.data<T>() + t * x.stride(0) + g * x.stride(1) + n * x.stride(2);
        for (int64_t i = 0; i < half; ++i) {
          const A c = cosine[i], s = a.inverse ? -sine[i] : sine[i];
          const A low = static_cast<A>(head[i]), high = static_cast<A>(head[i + half]);
          head[i] = static_cast<T>(low * c - high * s);
          head[i + half] = static_cast<T>(high * c + low * s);
        }
      }
    }
  }
}

}  // namespace

void rope_ref(const RopeArgs& a) {
  with_element(a.x_TGNC.dtype(), [&](auto element) { rotate<decltype(element)>(a); });
}

}  // namespace moiety::nn
