#include "moiety/moe/row_layout.h"

#include <algorithm>

#include "moiety/gemm/quantized_operand.h"

namespace moiety::moe {

std::string_view name(RowLayout layout) {
  switch (layout) {
    case RowLayout::kAuto:
      return "auto";
    case RowLayout::kExpert:
      return "expert";
    case RowLayout::kRank:
      return "rank";
  }
  return "?";
}

RowLayout choose_row_layout(RowLayout wanted, int64_t ranks) {
  if (wanted != RowLayout::kAuto) return wanted;
  return ranks == 1 ? RowLayout::kRank : RowLayout::kExpert;
}

RowCopies choose_row_copies(gemm::MlpPath path, int64_t model, int64_t ffn, int64_t hidden) {
  if (path != gemm::MlpPath::kSm90 && path != gemm::MlpPath::kSm90Fused) return {};
  // Rows in order are read by pairs of blocks, which is worth a copy to FC1 of the largest matrices.
  return {.forward = hidden * model > int64_t{1} << 25,
          .gradient = ffn > 2048,
          .weight_gradient = hidden > 2048 && std::max(hidden, model) > 4096};
}

bool keeps_columns(const QuantSpec& format, int64_t capacity, int64_t model, int64_t experts,
                   int64_t rows) {
  return gemm::column_bytes(format, capacity, model, experts) < 2 * rows * model;
}

}  // namespace moiety::moe
