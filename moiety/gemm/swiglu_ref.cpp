#include "moiety/formats/bf16.h"
#include "moiety/gemm/activation_block.h"
#include "moiety/gemm/row_dot.h"

namespace moiety::gemm {
namespace {

// Row r of the block's buffers.
template <class T, class Math>
struct Row {
  const ActivationBlock& block;
  int64_t r;

  bool gated() const { return block.activation.kind == ActivationKind::kGlu; }
  int64_t column(int h, int64_t f) const {
    return gated() ? hidden_column(h, f, block.ffn, block.interleave) : f;
  }
  Math h(int half, int64_t f) const {
    return static_cast<const T*>(block.h)[r * block.h_stride + column(half, f)];
  }
  Math y(int64_t f) const {
    return gated() ? glu(block.activation, h(0, f), h(1, f)) : squared_relu(h(0, f));
  }
  Math scaled(Math v) const { return block.prob ? v * static_cast<const Math*>(block.prob)[r] : v; }
  Math da(int64_t f) const { return static_cast<const T*>(block.da)[r * block.da_stride + f]; }
};

template <class T, class Math>
void forward(const ActivationBlock& block) {
  for (int64_t r = block.begin; r < block.begin + block.rows; ++r) {
    const Row<T, Math> row{block, r};
    T* a = static_cast<T*>(block.a) + r * block.a_stride;
    for (int64_t f = 0; f < block.ffn; ++f) a[f] = static_cast<T>(row.scaled(row.y(f)));
  }
}

template <class T, class Math>
void backward_row(const Row<T, Math>& row) {
  const ActivationBlock& block = row.block;
  if (block.dprob) {
    static_cast<Math*>(block.dprob)[row.r] = row_dot<Math>(
        block.ffn, [&](int64_t f) { return row.da(f); }, [&](int64_t f) { return row.y(f); });
  }
  T* dh = static_cast<T*>(block.dh) + row.r * block.dh_stride;
  T* a = block.a ? static_cast<T*>(block.a) + row.r * block.a_stride : nullptr;
  for (int64_t f = 0; f < block.ffn; ++f) {
    if (a) a[f] = static_cast<T>(row.scaled(row.y(f)));
    const Math t = row.scaled(row.da(f));
    if (row.gated()) {
      const ActivationGradient<Math> d =
          glu_gradient(block.activation, row.h(0, f), row.h(1, f), t);
      dh[row.column(0, f)] = static_cast<T>(d.a);
      dh[row.column(1, f)] = static_cast<T>(d.b);
    } else {
      dh[f] = static_cast<T>(squared_relu_gradient(row.h(0, f), t));
    }
  }
}

template <class T, class Math>
void backward(const ActivationBlock& block) {
  for (int64_t r = block.begin; r < block.begin + block.rows; ++r) {
    backward_row(Row<T, Math>{block, r});
  }
}

}  // namespace

void activation_forward_reference(const ActivationBlock& block) {
  switch (block.dtype) {
    case DType::kFloat64:
      return forward<double, double>(block);
    case DType::kBFloat16:
      return forward<bf16, float>(block);
    default:
      return forward<float, float>(block);
  }
}

void activation_backward_reference(const ActivationBlock& block) {
  switch (block.dtype) {
    case DType::kFloat64:
      return backward<double, double>(block);
    case DType::kBFloat16:
      return backward<bf16, float>(block);
    default:
      return backward<float, float>(block);
  }
}

}  // namespace moiety::gemm
