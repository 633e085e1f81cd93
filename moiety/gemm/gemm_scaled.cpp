// Products of operands whose scales are applied to accumulators.
#include <algorithm>
#include <cmath>
#include <vector>

#include "moiety/base/integer.h"
#include "moiety/gemm/gemm_block.h"

namespace moiety::gemm {
namespace {

// The size of the part of the output whose accumulators are kept between slices.
constexpr int64_t kScaledRows = 64, kScaledColumns = 512;

// `x` from row `row` on; the operand whose rows are the reduction from column `column` on.
ProductOperand moved(ProductOperand x, int64_t row, int64_t column, DType dtype) {
  x.first += row;
  x.data = static_cast<const std::byte*>(x.data) + byte_size(dtype, column);
  return x;
}

// Computes rows [i, i + m) and columns [j, j + n): `t` has their accumulators, `part` is the
// scratch of one slice.
void scaled_tile(const Product& g, const AccTile<float>& t, float* part, GemmEngine engine) {
  const bool transposed = g.op == GemmOp::kTN;
  std::fill_n(t.v, t.rows * t.n, 0.0f);
  for (int64_t slice = 0; slice * kScaledSlice < g.k; ++slice) {
    const int64_t k = slice * kScaledSlice;
    Product one;
    one.op = g.op;
    one.dtype = g.dtype;
    one.m = t.rows;
    one.n = t.n;
    one.k = std::min(kScaledSlice, g.k - k);
    one.a = moved(g.a, t.i, k, g.dtype);
    one.b = moved(g.b, transposed ? t.j : k, transposed ? k : t.j, g.dtype);
    one.epilogue.out = part;
    one.epilogue.out_stride = t.n;
    block_gemm(one, engine);
    for (int64_t r = 0; r < t.rows; ++r) {
      const float a_scale = g.a_scales.at(t.i + r, slice);
      for (int64_t x = 0; x < t.n; ++x) {
        float& acc = t.v[r * t.stride + x];
        acc = std::fma(part[r * t.n + x], a_scale * g.b_scales.at(t.j + x, slice), acc);
      }
    }
  }
  finish_tile<float>(g.epilogue, t);
}

}  // namespace

void block_gemm_scaled(const Product& g, GemmEngine engine) {
  thread_local std::vector<float> scratch;
  scratch.resize(2 * kScaledRows * kScaledColumns);
  for (int64_t i = 0; i < g.m; i += kScaledRows) {
    for (int64_t j = 0; j < g.n; j += kScaledColumns) {
      const int64_t n = std::min(kScaledColumns, g.n - j);
      const AccTile<float> tile{scratch.data(), n, g.row + i, std::min(kScaledRows, g.m - i),
                                g.column + j,   n};
      scaled_tile(g, tile, scratch.data() + kScaledRows * kScaledColumns, engine);
    }
  }
}

ProductFactor tensor_scale(const OperandScale& scale) {
  if (!scale.tensor.defined()) return {};
  return {1, scale.tensor.data<float>(), 1};
}

BlockScales block_scales(const OperandScale& scale, const TensorView& block) {
  if (!block.defined()) return {};
  return {block.data<float>(), block.stride(0), block.stride(1), scale.block_rows};
}

void check_scale(const char* operation, const char* argument, const OperandScale& scale,
                 const ScaledOperand& x) {
  if (scale.tensor.defined()) {
    check_tensor(operation, argument, scale.tensor, DType::kFloat32, {x.groups});
    MOIETY_CHECK(scale.tensor.contiguous(), "{}: {} is {}", operation, argument,
                 scale.tensor.describe());
  }
  if (!scale.block.defined()) return;
  MOIETY_CHECK(scale.block_rows >= 1, "{}: {} of blocks of {} rows", operation, argument,
               scale.block_rows);
  const int64_t rows = ceil_div(x.rows, scale.block_rows);
  const int64_t slices = ceil_div(x.reduction, kScaledSlice);
  if (x.each) {
    check_tensor(operation, argument, scale.block, DType::kFloat32, {x.groups, rows, slices});
  } else {
    check_tensor(operation, argument, scale.block, DType::kFloat32, {rows, slices});
  }
}

void check_scales(const char* operation, const OperandScale& a, const OperandScale& b,
                  bool transposed_product) {
  MOIETY_CHECK(a.block.defined() == b.block.defined(),
               "{}: block scales of a are {}, of b {}: both or none", operation, a.block.describe(),
               b.block.describe());
  MOIETY_CHECK(!a.block.defined() || !transposed_product,
               "{}: block scales lie along the reduction, which kNT has in rows", operation);
}

}  // namespace moiety::gemm
