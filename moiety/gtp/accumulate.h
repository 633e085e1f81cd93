// The end of every reduce: the chunks that the ranks sent are summed and added to main_grad
// (docs/spec/gtp.md#sum).
//
//    x = f32(c_0);  x = x + f32(c_j), j = 1 .. G-1       in rank order, each sum rounded to nearest
//    main = first ? x : main + x                         rounded once more if main is bf16
//
// Rows from `valid_rows` on are padding: nothing of the chunks is read there, and main_grad is 0
// (the first contribution writes it, later ones leave it alone).
#pragma once

#include <cstdint>
#include <span>

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"

namespace moiety::gtp {

// `chunks` are this rank's part of every rank's gradient, by rank: [members, rows, cols], float32
// or bfloat16, with contiguous columns and any stride of rows and members. main_grad has the same
// shape; it is float32, or bfloat16 if the chunks are, and overlaps no chunk.
void accumulate(std::span<const TensorView> chunks, TensorView main_grad, int64_t valid_rows,
                bool first, Stream stream);

}  // namespace moiety::gtp
