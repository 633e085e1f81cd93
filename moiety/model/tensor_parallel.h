// The communication of tensor parallelism with sequence parallelism (after Megatron-LM: Shoeybi et
// al., 2019; Korthikanti et al., 2022). n ranks share the sequences of a micro-batch. Between
// blocks rank t holds its own tokens, [B, S/n]: tokens [t S/n, (t+1) S/n) of every sequence. A
// block gathers its input, computes with the rank's slice of the weights, and sums the ranks'
// partial outputs onto own tokens; backward likewise.
//
// Tensors travel as they are stored. Sums are taken in fp32 in rank order and rounded once. The
// functions are collective over pass.tp. Without pass.tp there is one rank: gather_tokens and the
// functions of layers then do what one rank does, and the others are not called.
#pragma once

#include "moiety/model/linear_layer.h"
#include "moiety/model/pass.h"

namespace moiety::model {

// The rows x [T, N] of all tokens, from own [T/n, N]; on the arena. Without pass.tp it is `own`.
TensorView gather_tokens(const Pass& pass, TensorView own);

// Memory for partial outputs of all ranks' tokens, in storage, that the next call to a function below
// sums: [rows, N]. Without another such call, or a gather, in between.
TensorView partial_tensor(const Pass& pass, int64_t rows, int64_t width);

// out = round(the sum over ranks of the own tokens' rows of their `partial` + addend). partial is
// [T, N]; addend and out are [T/n, N] of any element type; the addend is optional and may be out.
void sum_to_own(const Pass& pass, TensorView partial, TensorView addend, TensorView out);
// The same for rows that lie by rank: n parts with the same number of rows, which need not be T/n.
void sum_parts_to_own(const Pass& pass, TensorView partial, TensorView addend, TensorView out);

// parts [n rows, N] := the ranks' own [rows, N], by rank.
void gather_parts(const Pass& pass, TensorView own, TensorView parts);

// The forward of a layer whose weight is cut by columns: y = round(x w^T summed over ranks +
// residual). y and residual are of own tokens, x of all tokens.
void forward_to_own(const Pass& pass, const LinearLayer& layer, TensorView x, TensorView y,
                    TensorView residual);
// The input's gradient of a layer whose weight is cut by rows, summed over ranks. dx is of own
// tokens, dy of all tokens.
void input_gradient_to_own(const Pass& pass, const LinearLayer& layer, TensorView dy,
                           TensorView dx);

}  // namespace moiety::model
