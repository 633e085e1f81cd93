// The operands of a quantized linear layer's products. A tensor is quantized, then turned into the
// exact bf16 operand of quant/dequantize.h and the scales that this leaves to the accumulators.
// Only this file knows which direction and rounding an operand has
// (docs/spec/grouped.md#quantized-linears).
//
//    product        a                          b
//    y  = x w^T     x, blocks along K          w
//    dx = dy w      dy, blocks along N         w, along N where its format has two directions
//    dw = dy^T x    dy, blocks along tokens    x, blocks along tokens
//
// Operands are tensors on the arena, which the caller releases; nothing else stays there. Every
// call quantizes anew, but for rows that came as codes and columns that were kept as codes.
#pragma once

#include <span>

#include "moiety/base/arena.h"
#include "moiety/gemm/grouped_gemm.h"
#include "moiety/quant/quantize.h"

namespace moiety::gemm {

// The formats of a quantized linear layer. Blocks of x and dy lie along the reduction, so options
// of the col direction (rht_col) only concern dw; they are equal in both.
struct Recipe {
  QuantSpec weight, input, gradient;
  friend bool operator==(const Recipe&, const Recipe&) = default;
};

// A weight as its owner keeps it: in a format, one tensor for each expert (1 for a dense layer), or
// as bf16 values [N, K] or [E, N, K], which are quantized for every use, with the same bits.
struct LinearWeight {
  std::span<const QuantizedView> quantized = {};
  TensorView values = {};

  int64_t experts() const;
  int64_t rows() const;     // N
  int64_t columns() const;  // K
};

// The random numbers that round a gradient (quant/rounding.h); rng is null where none are needed.
// row0 is the place of the first token in the whole micro-step, full_rows the tokens of the
// micro-step; col0 and full_cols are the same for columns, where ranks hold slices. For groups,
// whose rows count from their own start, `expert` is the global number + 1 of the first.
struct RandomBits {
  const quant::RngState* rng = nullptr;
  uint32_t tensor_id = 0;
  int32_t expert = 0;
  int64_t row0 = 0, full_rows = 0, col0 = 0, full_cols = 0;
};

// How a tensor is cast, beside its format.
struct OperandCast {
  RandomBits random = {};
  // kFp8Tensor with delayed scaling: the state of the tensor, one element for each group; its
  // step_amax is raised. Null: the scale is that of the amax now.
  const quant::DelayedScaling* delayed = nullptr;
};

struct Operand {
  TensorView data;  // bf16
  OperandScale scale;
  // The data of a matrix [M, K] is [K, M]. It may have more columns than M, the tail of a
  // transform, which are multiplied too.
  bool transposed = false;
  // The rows of groups are read from data through it, if it is defined; block scales are not.
  TensorView source_R = {};
};

// The operand of x [rows, columns] in direction `direction`.
Operand make_operand(const QuantSpec& spec, Direction direction, TensorView x,
                     const OperandCast& cast, Arena& arena, Stream stream);

// The same for rows that belong to groups. In the col direction group e begins at row (transposed:
// column) 128 * sum over j < e of ceil(n_j / 128): multiply by the groups of
// grouped_operand_groups.
//
// With a map (x.source_R) rows whose codes depend on nothing but themselves are quantized where
// they lie, once each, and the product reads them through the map. Others, with scales or random
// bits of their group or blocks along tokens, are gathered for the time of being quantized.
Operand make_grouped_operand(const QuantSpec& spec, Direction direction, const GroupedTensor& x,
                             const Groups& groups, const OperandCast& cast, Arena& arena,
                             Stream stream);
// The same in the row direction for rows that are quantized already (in a format without tensor
// scales), [capacity] or, with `source_R`, those that it maps from: the operand that
// make_grouped_operand would make of rows with these codes.
Operand make_row_operand(const QuantizedView& rows, const TensorView& source_R, Arena& arena,
                         Stream stream);
// Memory on the arena for the row direction of [rows, cols].
QuantizedView allocate_rows(const QuantSpec& spec, int64_t rows, int64_t cols, Arena& arena);
int64_t row_bytes(const QuantSpec& spec, int64_t rows, int64_t cols);

// Of rows that belong to groups the codes of the col direction: all that a weight gradient needs of
// x. make_grouped_operand(kCol) is make_column_operand of these, with the same bits.
QuantizedView allocate_columns(const QuantSpec& spec, int64_t capacity, int64_t cols,
                               int64_t experts, Arena& arena);
int64_t column_bytes(const QuantSpec& spec, int64_t capacity, int64_t cols, int64_t experts);
// Fills them; rows that are read through a map are on the arena meanwhile. `rows`, optional: x as
// codes of rows in a format without tensor scales. x is then not read, but for its shape and map.
void fill_columns(const QuantizedView& columns, const GroupedTensor& x, const QuantizedView& rows,
                  const Groups& groups, const OperandCast& cast, Arena& arena, Stream stream);
Operand make_column_operand(const QuantizedView& columns, const Groups& groups, Arena& arena,
                            Stream stream);

Groups grouped_operand_groups(const QuantSpec& spec, const Groups& groups, Arena& arena,
                              Stream stream);

// The operand of w for y (kRow) or for dx (kCol): data is [E, N, K], transposed [E, K, N].
Operand make_weight_operand(const QuantSpec& spec, Direction direction, const LinearWeight& w,
                            Arena& arena, Stream stream);

// Bytes of the arena that an operand takes: those that stay, and the most while it is made.
struct OperandBytes {
  int64_t kept = 0, peak = 0;
};
// The bytes of make_grouped_operand; with groups 0 those of make_operand. `sources`: the rows that a
// map reads, 0 without one.
OperandBytes operand_bytes(const QuantSpec& spec, Direction direction, int64_t rows, int64_t cols,
                           int64_t groups, int64_t sources = 0);
// `in_format` says that the weight's owner keeps it in the format.
OperandBytes weight_operand_bytes(const QuantSpec& spec, Direction direction, int64_t rows,
                                  int64_t cols, int64_t experts, bool in_format);

}  // namespace moiety::gemm
