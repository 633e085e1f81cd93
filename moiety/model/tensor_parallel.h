// What travels between the ranks of tensor parallelism with sequence parallelism (after
// Megatron-LM: Shoeybi et al., 2019; Korthikanti et al., 2022). n such ranks share the sequences of
// a micro-batch. Between blocks rank t holds tokens [t S/n, (t+1) S/n) of every sequence, its own
// tokens, [B, S/n]. A block gathers its input, computes with the rank's slice of the weights, and
// sums the ranks' partial outputs onto own tokens; backward likewise.
//
// Tensors travel as they are stored. Sums are taken in fp32 in rank order and rounded once.
// Collective over pass.tp, without which (one rank) gather_tokens and the functions of layers do
// what one rank does, and the others are not called.
#pragma once

#include "moiety/model/linear_layer.h"
#include "moiety/model/pass.h"

namespace moiety::model {

// x [T, N] of all tokens, from own [T/n, N]; on the arena. Without pass.tp: own.
TensorView gather_tokens(const Pass& pass, TensorView own);

// out = round(sum over ranks of the own tokens' rows of their `partial` + addend). partial [T, N];
// addend and out [T/n, N] of any element type; the addend is optional and may be out.
void sum_to_own(const Pass& pass, TensorView partial, TensorView addend, TensorView out);
// The same of rows that lie by rank: n parts with equally many rows, not only T/n.
void sum_parts_to_own(const Pass& pass, TensorView partial, TensorView addend, TensorView out);

// x := op over the ranks of x.
void reduce_over_tp(const Pass& pass, TensorView x, comm::ReduceOp op);
// [n rows, N] := the ranks' [rows, N], by rank.
void gather_parts(const Pass& pass, TensorView own, TensorView parts);

// Of a layer whose weight is cut by columns: y = round(x w^T summed over ranks + residual), on own
// tokens; x of all tokens.
void forward_to_own(const Pass& pass, const LinearLayer& layer, TensorView x, TensorView y,
                    TensorView residual);
// Of a layer whose weight is cut by rows: the gradient dx of its input, summed over ranks, on own
// tokens; dy of all tokens.
void input_gradient_to_own(const Pass& pass, const LinearLayer& layer, TensorView dy,
                           TensorView dx);

}  // namespace moiety::model
