// The fast path of RMSNorm: blocks of rows spread over the cores, and the reference's arithmetic on
// rows widened to float.
#include <algorithm>
#include <cmath>

#include "moiety/base/integer.h"
#include "moiety/base/parallel.h"
#include "moiety/base/simd.h"
#include "moiety/nn/element.h"
#include "moiety/nn/norm.h"
#include "moiety/nn/rows.h"
#include "moiety/nn/scratch.h"

namespace moiety::nn {
namespace {

constexpr int64_t kBlockRows = 64;

// Some rows of one call, at most a block.
struct Rows {
  const void* x[kBlockRows];
  const void* dy[kBlockRows];      // backward
  const void* addend[kBlockRows];  // backward; null: none
  void* out[kBlockRows];
  int64_t rows = 0;
  int64_t n = 0;
  float eps = 0;
  const float* g = nullptr;
  float* dg[kBlockRows];     // backward: the sum that a row belongs to
  float* scratch = nullptr;  // [2, n]
};

// The lane_sum of fma(a, b), whole groups of 8 first, which the compiler unrolls. Lanes that no
// group reaches would hold +0, and none ever holds -0, so leaving them out changes no bit.
MOIETY_INLINE float dot(const float* a, const float* b, int64_t n) {
  constexpr int64_t kLanes = 32, kGroup = 8;
  float lane[kLanes];
  const int64_t whole = n / kGroup, groups = ceil_div(n, kGroup);
  for (int64_t l = 0; l < std::min(groups, kLanes); ++l) lane[l] = 0.0f;
  for (int64_t g = 0; g < whole; ++g, a += kGroup, b += kGroup) {
    float v = lane[g % kLanes];
    for (int64_t i = 0; i < kGroup; ++i) v = std::fma(a[i], b[i], v);
    lane[g % kLanes] = v;
  }
  for (int64_t i = 0; i < n % kGroup; ++i) {
    lane[whole % kLanes] = std::fma(a[i], b[i], lane[whole % kLanes]);
  }
  for (int64_t o = kLanes / 2; o >= 1; o /= 2) {
    for (int64_t l = 0; l < o && l + o < groups; ++l) lane[l] += lane[l + o];
  }
  return lane[0];
}

// sum[i] := 1 / sqrt(mean + eps).
MOIETY_INLINE void inverse_rms(const Rows& a, float* sum) {
  const auto n = static_cast<float>(a.n);
  for (int64_t i = 0; i < a.rows; ++i) sum[i] = 1.0f / std::sqrt(sum[i] / n + a.eps);
}

// Takes all sums first, so that their chains of additions and the divisions overlap from row to
// row.
template <class T>
MOIETY_INLINE void forward_rows(const Rows& a) {
  float r[kBlockRows];
  for (int64_t row = 0; row < a.rows; ++row) {
    const T* x = static_cast<const T*>(a.x[row]);
    float* wide = a.scratch;
    for (int64_t d = 0; d < a.n; ++d) wide[d] = static_cast<float>(x[d]);
    r[row] = dot(wide, wide, a.n);
  }
  inverse_rms(a, r);
  for (int64_t row = 0; row < a.rows; ++row) {
    const T* x = static_cast<const T*>(a.x[row]);
    T* y = static_cast<T*>(a.out[row]);
    const float r_row = r[row];
    // y may be exactly x.
#pragma GCC ivdep
    for (int64_t d = 0; d < a.n; ++d)
      y[d] = static_cast<T>(static_cast<float>(x[d]) * r_row * a.g[d]);
  }
}

template <class T>
MOIETY_INLINE void backward_rows(const Rows& a) {
  float r[kBlockRows], dots[kBlockRows];
  const int64_t n = a.n;
  float* x = a.scratch;
  float* u = a.scratch + n;
  const auto widen = [&](int64_t row) __attribute__((always_inline)) {
    const T* in = static_cast<const T*>(a.x[row]);
    const T* dy = static_cast<const T*>(a.dy[row]);
    for (int64_t d = 0; d < n; ++d) x[d] = static_cast<float>(in[d]);
    for (int64_t d = 0; d < n; ++d) u[d] = a.g[d] * static_cast<float>(dy[d]);
  };
  for (int64_t row = 0; row < a.rows; ++row) {
    widen(row);
    r[row] = dot(x, x, n);
    dots[row] = dot(u, x, n);
  }
  inverse_rms(a, r);
  for (int64_t row = 0; row < a.rows; ++row) {
    const T* dy = static_cast<const T*>(a.dy[row]);
    const T* addend = static_cast<const T*>(a.addend[row]);
    T* dx = static_cast<T*>(a.out[row]);
    const float r_row = r[row], c = r_row * r_row * r_row / static_cast<float>(n) * dots[row];
    widen(row);
    float* dg = a.dg[row];
    for (int64_t d = 0; d < n; ++d) {
      dg[d] = std::fma(static_cast<float>(dy[d]), x[d] * r_row, dg[d]);
    }
    if (addend) {
#pragma GCC ivdep
      for (int64_t d = 0; d < n; ++d) {
        dx[d] = static_cast<T>(static_cast<float>(addend[d]) + (r_row * u[d] - c * x[d]));
      }
    } else {
      for (int64_t d = 0; d < n; ++d) dx[d] = static_cast<T>(r_row * u[d] - c * x[d]);
    }
  }
}

using RowsFunction = void (*)(const Rows&);
MOIETY_SIMD_CLONES void forward_f32(const Rows& a) { forward_rows<float>(a); }
MOIETY_SIMD_CLONES void forward_bf16(const Rows& a) { forward_rows<bf16>(a); }
MOIETY_SIMD_CLONES void backward_f32(const Rows& a) { backward_rows<float>(a); }
MOIETY_SIMD_CLONES void backward_bf16(const Rows& a) { backward_rows<bf16>(a); }

template <class T, class Row>
void collect(const TensorView& x, int64_t begin, int64_t rows, Row* out) {
  RowCursor<T> cursor(x, begin);
  for (int64_t i = 0; i < rows; ++i, cursor.next()) out[i] = cursor.row();
}

// No rows yet, with the weight widened to float and `more` floats of scratch behind it.
template <class T>
Rows make_rows(const TensorView& weight_D, float eps, int64_t more) {
  Rows r;
  r.n = weight_D.size(0);
  r.eps = eps;
  r.scratch = thread_scratch<float>(3 * r.n + more);
  float* g = r.scratch + 2 * r.n;
  for (int64_t d = 0; d < r.n; ++d) g[d] = static_cast<float>(weight_D.data<T>()[d]);
  r.g = g;
  return r;
}

template <class T>
void forward(const NormArgs& a, RowsFunction run) {
  parallel_for(row_count(a.x), kBlockRows, [&](int64_t begin, int64_t end) {
    Rows rows = make_rows<T>(a.weight_D, a.eps, 0);
    rows.rows = end - begin;
    collect<T>(a.x, begin, rows.rows, rows.x);
    collect<T>(a.y, begin, rows.rows, rows.out);
    run(rows);
    for (int64_t i = 0; a.sink.defined() && i < rows.rows; ++i) {
      a.sink.add(0, a.y.dtype(), rows.out[i], rows.n);
    }
  });
}

// The gradient of a run of classes; `sum` is that of the weight. `rows` has memory for the classes
// behind its scratch.
template <class T>
void backward_run(const NormBackwardArgs& a, RowsFunction run, Rows& rows, int64_t number,
                  float* sum) {
  const int64_t n = rows.n, count = row_count(a.x);
  const NormOrder order = norm_order(n);
  float* classes = order.run > 1 ? rows.scratch + 3 * n : sum;
  std::fill_n(classes, order.run * n, 0.0f);
  for (int64_t begin = number * order.run; begin < count; begin += order.classes) {
    const int64_t some = std::min(order.run, count - begin), at = rows.rows;
    collect<T>(a.x, begin, some, rows.x + at);
    collect<T>(a.dy, begin, some, rows.dy + at);
    collect<T>(a.addend, begin, some, rows.addend + at);
    collect<T>(a.dx, begin, some, rows.out + at);
    for (int64_t i = 0; i < some; ++i) rows.dg[at + i] = classes + i * n;
    rows.rows += some;
    if (rows.rows + order.run <= kBlockRows && begin + order.classes < count) continue;
    run(rows);
    rows.rows = 0;
  }
  if (order.run == 1) return;
  std::fill_n(sum, n, 0.0f);
  for (int64_t c = 0; c < order.run; ++c) {
    for (int64_t d = 0; d < n; ++d) sum[d] += classes[c * n + d];
  }
}

template <class T>
void backward(const NormBackwardArgs& a, RowsFunction run) {
  const int64_t n = a.x.size(-1), blocks = norm_blocks(row_count(a.x), n);
  float* partial = a.workspace.data<float>();
  parallel_for(blocks, 8, [&](int64_t begin, int64_t end) {
    Rows rows = make_rows<T>(a.weight_D, a.eps, norm_order(n).run * n);
    for (int64_t b = begin; b < end; ++b) backward_run<T>(a, run, rows, b, partial + b * n);
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

}  // namespace moiety::nn
