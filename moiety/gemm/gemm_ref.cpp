#include "moiety/gemm/gemm_block.h"

namespace moiety::gemm {
namespace {

// Element p of the reduction, for row i of the product's left factor and column j of its right one.
template <class T, class Math>
Math left(const Product& g, int64_t i, int64_t p) {
  const bool transposed = g.op == GemmOp::kNT;
  const T* row = g.a.row<T>(transposed ? p : i);
  return row ? static_cast<Math>(row[transposed ? i : p]) : Math{0};
}

template <class T, class Math>
Math right(const Product& g, int64_t p, int64_t j) {
  const bool transposed = g.op == GemmOp::kTN;
  const T* row = g.b.row<T>(transposed ? j : p);
  return row ? static_cast<Math>(row[transposed ? p : j]) : Math{0};
}

template <class T, class Math>
void product(const Product& g) {
  for (int64_t i = g.row; i < g.row + g.m; ++i) {
    for (int64_t j = g.column; j < g.column + g.n; ++j) {
      Math acc = 0;
      for (int64_t p = 0; p < g.k; ++p) {
        acc = std::fma(left<T, Math>(g, i, p), right<T, Math>(g, p, j), acc);
      }
      finish_tile<Math>(g.epilogue, {&acc, 1, i, 1, j, 1});
    }
  }
}

}  // namespace

void block_gemm_reference(const Product& block) {
  switch (block.dtype) {
    case DType::kFloat64:
      return product<double, double>(block);
    case DType::kBFloat16:
      return product<bf16, float>(block);
    default:
      return product<float, float>(block);
  }
}

}  // namespace moiety::gemm
