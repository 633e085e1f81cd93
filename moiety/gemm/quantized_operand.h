// From a tensor to what a product of a quantized linear layer multiplies: quantize, then the exact
// bf16 operand of quant/dequantize.h, and what that leaves to the accumulators. The only place that
// knows which direction and rounding an operand has (docs/spec/grouped.md#quantized-linears).
//
//   product        a                          b
//   y  = x w^T     x, blocks along K          w
//   dx = dy w      dy, blocks along N         w, along N where its format has two directions
//   dw = dy^T x    dy, blocks along tokens    x, blocks along tokens
//
// Operands are tensors on the arena, which the caller releases; nothing else stays there. Every
// call quantizes anew: activations are saved in their storage type, never quantized.
#pragma once

#include <span>

#include "moiety/base/arena.h"
#include "moiety/gemm/grouped_gemm.h"
#include "moiety/quant/quantize.h"

namespace moiety::gemm {

// The formats of a quantized linear layer. Blocks of x and dy lie along the reduction; options of
// the col direction (rht_col) therefore concern dw alone, and are equal in both.
struct Recipe {
  QuantSpec weight, input, gradient;
  friend bool operator==(const Recipe&, const Recipe&) = default;
};

// A weight as its owner keeps it: in a format, one tensor for each expert (1 of a dense layer), or
// as bf16 values [N, K] or [E, N, K], which are quantized for every use. The same bits.
struct LinearWeight {
  std::span<const QuantizedView> quantized = {};
  TensorView values = {};

  int64_t experts() const;
  int64_t rows() const;     // N
  int64_t columns() const;  // K
};

// Which random numbers round a gradient (quant/rounding.h): rng is null where none are needed.
// row0 and full_rows: where its first token lies in the whole micro-step, and the tokens of that;
// col0 and full_cols: the same of its columns, where ranks hold slices; of groups, whose rows count
// from their own start, `expert`: global number + 1 of the first.
struct RandomBits {
  const quant::RngState* rng = nullptr;
  uint32_t tensor_id = 0;
  int32_t expert = 0;
  int64_t row0 = 0, full_rows = 0, col0 = 0, full_cols = 0;
};

struct Operand {
  TensorView data;  // bf16
  OperandScale scale;
  bool transposed = false;  // data of a matrix [M, K] is [K, M], or more columns than M, to be
                            // multiplied too: the tail of a transform
};

// x [rows, columns] in direction `direction`.
Operand make_operand(const QuantSpec& spec, Direction direction, TensorView x,
                     const RandomBits& random, Arena& arena, Stream stream);

// The same of rows that belong to groups. In the col direction group e begins at row (transposed:
// column) 128 * sum over j < e of ceil(n_j / 128): multiply by the groups of
// grouped_operand_groups.
Operand make_grouped_operand(const QuantSpec& spec, Direction direction, TensorView x,
                             const Groups& groups, const RandomBits& random, Arena& arena,
                             Stream stream);
// The same in the row direction of rows that are quantized already (format without tensor scales):
// what make_grouped_operand makes of rows that have these codes, without quantizing.
Operand make_row_operand(const QuantizedView& rows, Arena& arena, Stream stream);
// Memory for the row direction of [rows, cols], on the arena.
QuantizedView allocate_rows(const QuantSpec& spec, int64_t rows, int64_t cols, Arena& arena);
int64_t row_bytes(const QuantSpec& spec, int64_t rows, int64_t cols);

Groups grouped_operand_groups(const QuantSpec& spec, const Groups& groups, Arena& arena,
                              Stream stream);

// w for y (kRow) or for dx (kCol): data is [E, N, K], transposed [E, K, N].
Operand make_weight_operand(const QuantSpec& spec, Direction direction, const LinearWeight& w,
                            Arena& arena, Stream stream);

// Bytes that an operand takes of the arena: what stays, and the most while it is made.
struct OperandBytes {
  int64_t kept = 0, peak = 0;
};
// groups 0: make_operand.
OperandBytes operand_bytes(const QuantSpec& spec, Direction direction, int64_t rows, int64_t cols,
                           int64_t groups);
// `in_format`: the weight's owner keeps it so.
OperandBytes weight_operand_bytes(const QuantSpec& spec, Direction direction, int64_t rows,
                                  int64_t cols, int64_t experts, bool in_format);

}  // namespace moiety::gemm
