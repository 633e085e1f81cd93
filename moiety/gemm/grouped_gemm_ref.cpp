#include <algorithm>

#include "moiety/base/integer.h"
#include "moiety/base/parallel.h"
#include "moiety/gemm/grouped_block.h"
#include "moiety/gemm/row_dot.h"

namespace moiety::gemm {
namespace {

constexpr int64_t kBiasRows = 128;    // rows that are summed before the blocks' sums are
constexpr int64_t kBiasColumns = 64;  // columns of a task; no result depends on it

// Computes columns [c, c + n) of dbias[e].
template <class T, class Math>
void bias_grad(const GroupedBiasGradArgs& args, int64_t e, int64_t c, int64_t n) {
  const ProductOperand dy = block_operand(args.dy);
  const Math* scale = static_cast<const Math*>(args.scale_R.raw());
  const RowRange range = group_rows(args.groups, e);
  Math total[kBiasColumns] = {};
  for (int64_t begin = 0; begin < range.rows; begin += kBiasRows) {
    Math sum[kBiasColumns] = {};
    for (int64_t i = begin; i < std::min(range.rows, begin + kBiasRows); ++i) {
      const int64_t r = range.begin + i;
      const T* row = dy.row<T>(r);
      for (int64_t j = 0; j < n; ++j) {
        const Math v = row ? static_cast<Math>(row[c + j]) : Math{0};
        sum[j] = scale ? std::fma(v, scale[r], sum[j]) : sum[j] + v;
      }
    }
    for (int64_t j = 0; j < n; ++j) total[j] += sum[j];
  }
  Epilogue epilogue;
  epilogue.beta = {args.beta.of(e)};
  epilogue.out = args.dbias_EN.raw();
  epilogue.out_dtype = epilogue.old_dtype = args.dbias_EN.dtype();
  epilogue.out_stride = epilogue.old_stride = args.dbias_EN.size(1);
  epilogue.old = epilogue.out;
  finish_tile<Math>(epilogue, {total, n, e, 1, c, n});
}

template <class T, class Math>
void scale_grad(const GroupedScaleGradArgs& args, int64_t e) {
  const ProductOperand dy = block_operand(args.dy);
  const int64_t n = args.bias_EN.size(1);
  const T* bias = static_cast<const T*>(args.bias_EN.raw()) + e * n;
  Math* out = static_cast<Math*>(args.dscale_R.raw());
  const RowRange range = group_rows(args.groups, e);
  for (int64_t r = range.begin; r < range.begin + range.rows; ++r) {
    const T* row = dy.row<T>(r);
    const Math dot = row_dot<Math>(
        n, [&](int64_t j) { return row ? static_cast<Math>(row[j]) : Math{0}; },
        [&](int64_t j) { return static_cast<Math>(bias[j]); });
    out[r] = args.accumulate ? out[r] + dot : dot;
  }
}

template <class T, class Math>
void bias_grad(const GroupedBiasGradArgs& args) {
  const int64_t columns = args.dbias_EN.size(1);
  const int64_t pieces = ceil_div(columns, kBiasColumns);
  parallel_tasks(args.groups.experts * pieces, [&](int64_t task) {
    const int64_t c = task % pieces * kBiasColumns;
    bias_grad<T, Math>(args, task / pieces, c, std::min(kBiasColumns, columns - c));
  });
}

template <class T, class Math>
void scale_grad(const GroupedScaleGradArgs& args) {
  parallel_tasks(args.groups.experts, [&](int64_t e) { scale_grad<T, Math>(args, e); });
}

}  // namespace

void grouped_gemm_reference(const GroupedGemmArgs& args) {
  for (int64_t e = 0; e < args.groups.experts; ++e) block_gemm_reference(group_product(args, e));
}

void grouped_bias_grad_reference(const GroupedBiasGradArgs& args) {
  switch (args.dy.data.dtype()) {
    case DType::kFloat64:
      return bias_grad<double, double>(args);
    case DType::kBFloat16:
      return bias_grad<bf16, float>(args);
    default:
      return bias_grad<float, float>(args);
  }
}

void grouped_scale_grad_reference(const GroupedScaleGradArgs& args) {
  switch (args.dy.data.dtype()) {
    case DType::kFloat64:
      return scale_grad<double, double>(args);
    case DType::kBFloat16:
      return scale_grad<bf16, float>(args);
    default:
      return scale_grad<float, float>(args);
  }
}

}  // namespace moiety::gemm
