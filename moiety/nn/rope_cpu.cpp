// The fast path of rope: the reference's arithmetic, compiled for vectors, with tokens spread over
// the cores.
#include "moiety/base/parallel.h"
#include "moiety/base/simd.h"
#include "moiety/nn/element.h"
#include "moiety/nn/rope.h"

namespace moiety::nn {
namespace {

// Rotates `heads` heads that lie `stride` apart, all at one position.
template <class T>
MOIETY_INLINE void rotate(T* head, int64_t heads, int64_t stride, int64_t half, const float* table,
                          float sign) {
  for (int64_t n = 0; n < heads; ++n, head += stride) {
    T* low = head;
    T* high = head + half;
#pragma GCC ivdep
    for (int64_t i = 0; i < half; ++i) {
      const float c = table[i], s = sign * table[half + i];
      const float x = static_cast<float>(low[i]), y = static_cast<float>(high[i]);
      low[i] = static_cast<T>(x * c - y * s);
      high[i] = static_cast<T>(y * c + x * s);
    }
  }
}

using Rotate = void (*)(void*, int64_t, int64_t, int64_t, const float*, float);
MOIETY_SIMD_CLONES void rotate_f32(void* head, int64_t heads, int64_t stride, int64_t half,
                                   const float* table, float sign) {
  rotate(static_cast<float*>(head), heads, stride, half, table, sign);
}
MOIETY_SIMD_CLONES void rotate_bf16(void* head, int64_t heads, int64_t stride, int64_t half,
                                    const float* table, float sign) {
  rotate(static_cast<bf16*>(head), heads, stride, half, table, sign);
}

}  // namespace

void rope_cpu(const RopeArgs& a) {
  const TensorView& x = a.x_TGNC;
  const Rotate run = x.dtype() == DType::kBFloat16 ? rotate_bf16 : rotate_f32;
  const int64_t half = x.size(3) / 2;
  parallel_for(x.size(0), 64, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t position =
          a.position_T.defined() ? a.position_T.data<int32_t>()[t] : t % a.seq_len;
      const float* table = a.table.data<float>() + position * 2 * half;
      for (int64_t g = 0; g < x.size(1); ++g) {
        const int64_t offset = t * x.stride(0) + g * x.stride(1);
        run(static_cast<std::byte*>(x.raw()) + byte_size(x.dtype(), offset), x.size(2), x.stride(2),
            half, table, a.inverse ? -1.0f : 1.0f);
      }
    }
  });
}

}  // namespace moiety::nn
