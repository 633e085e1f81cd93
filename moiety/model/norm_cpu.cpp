// Blocks of 64 rows over the cores; per row the reference's arithmetic on rows widened to float.
#include <algorithm>
#include <cmath>

#include "moiety/base/math.h"
#include "moiety/base/parallel.h"
#include "moiety/base/simd.h"
#include "moiety/model/element.h"
#include "moiety/model/norm.h"
#include "moiety/model/rows.h"
#include "moiety/model/scratch.h"

namespace moiety::model {
namespace {

struct RowArgs {
  const void* x = nullptr;
  const void* g = nullptr;
  const void* dy = nullptr;
  const void* addend = nullptr;
  void* out = nullptr;
  float* dg = nullptr;
  int64_t n = 0;
  float eps = 0;
};

MOIETY_INLINE float dot(const float* a, const float* b, int64_t n) {
  return lane_sum<float>(
      n, [&](float v, int64_t i)
             __attribute__((always_inline)) { return std::fma(a[i], b[i], v); });
}

MOIETY_INLINE float inverse_rms(const float* x, int64_t n, float eps) {
  return 1.0f / std::sqrt(dot(x, x, n) / static_cast<float>(n) + eps);
}

template <class T>
MOIETY_INLINE void forward_row(const RowArgs& a, float* scratch) {
  const T* x = static_cast<const T*>(a.x);
  const T* g = static_cast<const T*>(a.g);
  T* y = static_cast<T*>(a.out);
  for (int64_t d = 0; d < a.n; ++d) scratch[d] = static_cast<float>(x[d]);
  const float r = inverse_rms(scratch, a.n, a.eps);
  for (int64_t d = 0; d < a.n; ++d)
    y[d] = static_cast<T>(scratch[d] * r * static_cast<float>(g[d]));
}

template <class T>
MOIETY_INLINE void backward_row(const RowArgs& a, float* scratch) {
  const T* x_in = static_cast<const T*>(a.x);
  const T* g = static_cast<const T*>(a.g);
  const T* dy = static_cast<const T*>(a.dy);
  const T* addend = static_cast<const T*>(a.addend);
  T* dx = static_cast<T*>(a.out);
  float* x = scratch;
  float* u = scratch + a.n;
  for (int64_t d = 0; d < a.n; ++d) x[d] = static_cast<float>(x_in[d]);
  for (int64_t d = 0; d < a.n; ++d) u[d] = static_cast<float>(g[d]) * static_cast<float>(dy[d]);
  const float r = inverse_rms(x, a.n, a.eps);
  const float c = r * r * r / static_cast<float>(a.n) * dot(u, x, a.n);
  for (int64_t d = 0; d < a.n; ++d) {
    a.dg[d] = std::fma(static_cast<float>(dy[d]), x[d] * r, a.dg[d]);
  }
  if (addend) {
    for (int64_t d = 0; d < a.n; ++d) {
      dx[d] = static_cast<T>(static_cast<float>(addend[d]) + (r * u[d] - c * x[d]));
    }
  } else {
    for (int64_t d = 0; d < a.n; ++d) dx[d] = static_cast<T>(r * u[d] - c * x[d]);
  }
}

using RowFunction = void (*)(const RowArgs&, float*);
MOIETY_SIMD_CLONES void forward_f32(const RowArgs& a, float* s) { forward_row<float>(a, s); }
MOIETY_SIMD_CLONES void forward_bf16(const RowArgs& a, float* s) { forward_row<bf16>(a, s); }
MOIETY_SIMD_CLONES void backward_f32(const RowArgs& a, float* s) { backward_row<float>(a, s); }
MOIETY_SIMD_CLONES void backward_bf16(const RowArgs& a, float* s) { backward_row<bf16>(a, s); }

template <class T>
void forward(const NormArgs& a, RowFunction run) {
  const int64_t n = a.x.size(-1);
  parallel_for(row_count(a.x), kNormBlockRows, [&](int64_t begin, int64_t end) {
    RowCursor<T> x(a.x, begin), y(a.y, begin);
    RowArgs row{.g = a.weight_D.raw(), .n = n, .eps = a.eps};
    for (int64_t i = begin; i < end; ++i, x.next(), y.next()) {
      row.x = x.row();
      row.out = y.row();
      run(row, thread_scratch<float>(n));
    }
  });
}

template <class T>
void backward(const NormBackwardArgs& a, RowFunction run) {
  const int64_t n = a.x.size(-1), rows = row_count(a.x), blocks = norm_blocks(rows);
  float* partial = a.workspace.data<float>();
  parallel_for(rows, kNormBlockRows, [&](int64_t begin, int64_t end) {
    RowCursor<T> x(a.x, begin), dy(a.dy, begin), addend(a.addend, begin), dx(a.dx, begin);
    RowArgs row{.g = a.weight_D.raw(), .n = n, .eps = a.eps};
    row.dg = partial + begin / kNormBlockRows * n;
    std::fill_n(row.dg, n, 0.0f);
    for (int64_t i = begin; i < end; ++i, x.next(), dy.next(), addend.next(), dx.next()) {
      row.x = x.row();
      row.dy = dy.row();
      row.addend = addend.row();
      row.out = dx.row();
      run(row, thread_scratch<float>(2 * n));
    }
  });
  float* total = thread_scratch<float>(n);
  std::fill_n(total, n, 0.0f);
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t d = 0; d < n; ++d) total[d] += partial[b * n + d];
  }
  float* grad = a.grad_D.data<float>();
  for (int64_t d = 0; d < n; ++d) grad[d] = a.accumulate ? grad[d] + total[d] : total[d];
}

}  // namespace

void norm_cpu(const NormArgs& a) {
  a.x.dtype() == DType::kBFloat16 ? forward<bf16>(a, forward_bf16) : forward<float>(a, forward_f32);
}

void norm_backward_cpu(const NormBackwardArgs& a) {
  a.x.dtype() == DType::kBFloat16 ? backward<bf16>(a, backward_bf16)
                                  : backward<float>(a, backward_f32);
}

}  // namespace moiety::model
