#include <algorithm>

#include "moiety/base/parallel.h"
#include "moiety/gemm/mlp_steps.h"

namespace moiety::gemm {
namespace {

ActivationBlock rows_of_group(const ActivationBlock& block, const Groups& groups, int64_t e) {
  ActivationBlock out = block;
  const RowRange range = group_rows(groups, e);
  out.begin = range.begin;
  out.rows = range.rows;
  return out;
}

template <class T, class Math>
void sum_rows(const TensorView& rows_RD, const TensorView& row_TK, const TensorView& out_TD) {
  const int64_t columns = out_TD.size(1), topk = row_TK.size(1), limit = rows_RD.size(0);
  const T* rows = static_cast<const T*>(rows_RD.raw());
  parallel_for(out_TD.size(0), 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int32_t* index = row_TK.data<int32_t>() + t * row_TK.stride(0);
      T* out = static_cast<T*>(out_TD.raw()) + t * out_TD.stride(0);
      for (int64_t c = 0; c < columns; ++c) {
        Math sum = 0;
        bool first = true;
        for (int64_t k = 0; k < topk; ++k) {
          if (index[k] < 0 || index[k] >= limit) continue;
          const Math term = rows[index[k] * rows_RD.stride(0) + c];
          sum = first ? term : sum + term;
          first = false;
        }
        out[c] = static_cast<T>(sum);
      }
    }
  });
}

}  // namespace

void grouped_mlp_forward_reference(const MlpForwardSteps& steps) {
  const Groups& groups = steps.fc1.groups;
  grouped_gemm_reference(steps.fc1);
  for (int64_t e = 0; e < groups.experts; ++e) {
    activation_forward_reference(rows_of_group(steps.activation, groups, e));
  }
  grouped_gemm_reference(steps.fc2);
}

void grouped_mlp_backward_reference(const MlpBackwardSteps& steps) {
  const Groups& groups = steps.fc2_dgrad.groups;
  grouped_gemm_reference(steps.fc2_dgrad);
  for (int64_t e = 0; e < groups.experts; ++e) {
    activation_backward_reference(rows_of_group(steps.activation, groups, e));
  }
  if (steps.fc1_dgrad.out.defined()) grouped_mlp_input_reference(steps.fc1_dgrad, steps.interleave);
}

void grouped_mlp_input_reference(const GroupedGemmArgs& fc1_dgrad, int64_t interleave) {
  for (int64_t e = 0; e < fc1_dgrad.groups.experts; ++e) {
    block_gemm_reference(over_plain_columns(group_product(fc1_dgrad, e), interleave));
  }
}

void sum_rows_reference(const TensorView& rows_RD, const TensorView& row_TK,
                        const TensorView& out_TD) {
  switch (rows_RD.dtype()) {
    case DType::kFloat64:
      return sum_rows<double, double>(rows_RD, row_TK, out_TD);
    case DType::kBFloat16:
      return sum_rows<bf16, float>(rows_RD, row_TK, out_TD);
    default:
      return sum_rows<float, float>(rows_RD, row_TK, out_TD);
  }
}

}  // namespace moiety::gemm
