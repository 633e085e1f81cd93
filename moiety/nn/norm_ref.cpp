#include <algorithm>
#include <cmath>
#include <vector>

#include "moiety/base/math.h"
#include "moiety/nn/element.h"
#include "moiety/nn/norm.h"
#include "moiety/nn/rows.h"

namespace moiety::nn {
namespace {

template <class T, class A = Compute<T>>
A inverse_rms(const T* x, int64_t n, float eps) {
  const A sum = lane_sum<A>(
      n, [&](A v, int64_t i) { return std::fma(static_cast<A>(x[i]), static_cast<A>(x[i]), v); });
  return A(1) / std::sqrt(sum / static_cast<A>(n) + static_cast<A>(eps));
}

template <class T>
void forward(const NormArgs& a) {
  using A = Compute<T>;
  const int64_t n = a.x.size(-1);
  const T* g = a.weight_D.data<T>();
  RowCursor<T> x(a.x, 0), y(a.y, 0);
  for (int64_t row = 0; row < row_count(a.x); ++row, x.next(), y.next()) {
    const A r = inverse_rms(x.row(), n, a.eps);
    for (int64_t d = 0; d < n; ++d) {
      y.row()[d] = static_cast<T>(static_cast<A>(x.row()[d]) * r * static_cast<A>(g[d]));
    }
    if (a.sink.defined()) a.sink.add(0, a.y.dtype(), y.row(), n);
  }
}

// One row: writes dx, and adds the row's term of the weight's gradient to `dg`.
template <class T, class A>
void backward_row(const T* x, const T* g, const T* dy, const T* addend, T* dx, A* dg, int64_t n,
                  float eps) {
  const A r = inverse_rms(x, n, eps);
  const auto u = [&](int64_t d) { return static_cast<A>(g[d]) * static_cast<A>(dy[d]); };
  const A dot =
      lane_sum<A>(n, [&](A v, int64_t d) { return std::fma(u(d), static_cast<A>(x[d]), v); });
  const A c = r * r * r / static_cast<A>(n) * dot;
  for (int64_t d = 0; d < n; ++d) {
    const A xd = static_cast<A>(x[d]);
    dg[d] = std::fma(static_cast<A>(dy[d]), xd * r, dg[d]);
    const A value = r * u(d) - c * xd;
    dx[d] = static_cast<T>(addend ? static_cast<A>(addend[d]) + value : value);
  }
}

template <class T>
void backward(const NormBackwardArgs& a) {
  using A = Compute<T>;
  const int64_t n = a.x.size(-1), rows = row_count(a.x), blocks = norm_blocks(rows, n);
  const NormOrder order = norm_order(n);
  A* partial = a.workspace.data<A>();
  std::fill_n(partial, blocks * n, A(0));
  std::vector<A> sums(std::min(rows, order.classes) * n);
  RowCursor<T> x(a.x, 0), dy(a.dy, 0), addend(a.addend, 0), dx(a.dx, 0);
  for (int64_t row = 0; row < rows; ++row, x.next(), dy.next(), addend.next(), dx.next()) {
    backward_row(x.row(), a.weight_D.data<T>(), dy.row(), addend.row(), dx.row(),
                 sums.data() + row % order.classes * n, n, a.eps);
  }
  for (int64_t c = 0; c < std::min(rows, order.classes); ++c) {
    for (int64_t d = 0; d < n; ++d) partial[c / order.run * n + d] += sums[c * n + d];
  }
  A* grad = a.grad_D.data<A>();
  for (int64_t d = 0; d < n; ++d) {
    A sum = 0;
    for (int64_t b = 0; b < blocks; ++b) sum += partial[b * n + d];
    grad[d] = a.accumulate ? grad[d] + sum : sum;
  }
}

}  // namespace

void norm_ref(const NormArgs& a) {
  with_element(a.x.dtype(), [&](auto element) { forward<decltype(element)>(a); });
}

void norm_backward_ref(const NormBackwardArgs& a) {
  with_element(a.x.dtype(), [&](auto element) { backward<decltype(element)>(a); });
}

}  // namespace moiety::nn
