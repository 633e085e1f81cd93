// The small element-by-element operations of the model. Tensors have no gaps.
#pragma once

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"

namespace moiety::nn {

// start[b, s] = s - position[b, s], int32: the first key that a query sees, where positions count
// from the start of the query's document.
void document_starts(TensorView position_BS, TensorView start_BS, Stream stream);

// out = round(x), or round(out + x) if `accumulate`; x is float32, out bfloat16.
void round_to_bf16(TensorView x, TensorView out, bool accumulate, Stream stream);

// x := sigmoid(x), in float32.
void apply_sigmoid(TensorView x_T, Stream stream);
// dx = round(dy s (1 - s)), where s is the sigmoid's value; s and dy are float32, dx is storage.
void sigmoid_gradient(TensorView s_T, TensorView dy_T, TensorView dx_T, Stream stream);

// state := {seed, draw}, a quant::RngState as uint64 [2]. If `draw_at`, uint64 [1], is there, the
// draw is read from it.
struct RandomState {
  TensorView state_2;
  uint64_t seed = 0, draw = 0;
  TensorView draw_at;
};
void set_random_state(const RandomState& args, Stream stream);

// The same bits on a GPU.
void document_starts_cuda(TensorView position_BS, TensorView start_BS, const Stream& stream);
void round_to_bf16_cuda(TensorView x, TensorView out, bool accumulate, const Stream& stream);
void apply_sigmoid_cuda(TensorView x_T, const Stream& stream);
void set_random_state_cuda(const RandomState& args, const Stream& stream);
void sigmoid_gradient_cuda(TensorView s_T, TensorView dy_T, TensorView dx_T, const Stream& stream);

}  // namespace moiety::nn
