// The operators of torch.ops.moiety: their schemas (library.cpp) say what mutates; shapes are those
// of the core's headers. Letters: R rows of the buffers, E experts, N out and C in features, T
// tokens, K choices, D model size, F ffn size, H = 2F or F columns of the hidden activation.
#pragma once

#include <string>
#include <tuple>

#include "python/csrc/call.h"

namespace moiety::torch_ops {

// ---- grouped.cpp: grouped linears and the grouped MLP. Rows past the sum of `splits` [E] are dead:
// they influence nothing, and results are zero there but for the _out and _acc forms, which leave
// them alone. The gradient of a weight adds to main_grad where that is given.
Tensor grouped_linear(Tensor x, Tensor w, Tensor splits, Optional bias, Optional row_scale,
                      Optional main_grad);
void grouped_linear_out(Tensor x, Tensor w, Tensor splits, Optional bias, Optional row_scale,
                        Tensor out);
// x [R, C] times w [E, C, N].
Tensor grouped_linear_t(Tensor x, Tensor w, Tensor splits);
Tensor grouped_linear_dgrad(Tensor dy, Tensor w, Tensor splits);
// dw [E, N, C] in x's dtype; `dy_source`, `x_source`: int32 [R], the rows of dy and x.
Tensor grouped_linear_wgrad(Tensor dy, Tensor x, Tensor splits, Optional dy_source,
                            Optional x_source);
// main_grad := beta * main_grad + dw; float32 or bfloat16; beta is float32 [1], absent: 1.
void grouped_linear_wgrad_acc(Tensor dy, Tensor x, Tensor splits, Optional dy_source,
                              Optional x_source, Tensor main_grad, Optional beta);
// {dbias [E, N], dscale [R] or [0]}.
std::tuple<Tensor, Tensor> grouped_linear_bias_grad(Tensor dy, Tensor splits, Tensor bias,
                                                    Optional row_scale);
// {y [T, D] with row_tk, else [R, D]; h [R, H], for backward}.
std::tuple<Tensor, Tensor> grouped_mlp(Tensor x, Tensor w1, Tensor w2, Tensor splits,
                                       Optional row_scale, Optional source, Optional row_tk,
                                       Optional b1, Optional b2, std::string kind, double alpha,
                                       double limit, double offset, int64_t interleave,
                                       Optional main_grad1, Optional main_grad2);
// {dx, dscale, db1, db2, dh, a}: all that is not the gradient of a weight, and what that needs.
// Without `need_dx` dx is absent ([0]), as are gradients of what is absent.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> grouped_mlp_backward(
    Tensor dy, Tensor h, Tensor x, Tensor w1, Tensor w2, Tensor splits, Optional row_scale,
    Optional source, Optional row_tk, Optional b1, Optional b2, std::string kind, double alpha,
    double limit, double offset, int64_t interleave, bool need_dx);

// ---- activation.cpp: what stands between the two linears (moiety/gemm/swiglu.h), as an operation of
// its own: a [R, F] of h [R, H]. With `splits` [E] rows past their sum are dead, else all are live.
Tensor activation(Tensor h, Optional splits, Optional row_scale, std::string kind, double alpha,
                  double limit, double offset, int64_t interleave);
// {dh [R, H], dscale [R] or [0]}.
std::tuple<Tensor, Tensor> activation_backward(Tensor da, Tensor h, Optional splits,
                                               Optional row_scale, std::string kind, double alpha,
                                               double limit, double offset, int64_t interleave);

// ---- recipes.cpp: grouped linears whose operands are quantized as the trainer's recipes say
// (moiety/model/precision.h: fp8_tensor, fp8_block, mxfp8, nvfp4); bfloat16 outside. `rng` is {seed,
// draw}, int64 [2]: nvfp4 rounds dy with it, and backward operators need it then.
Tensor quantized_linear(Tensor x, Tensor w, Tensor splits, Optional bias, Optional row_scale,
                        Optional main_grad, Optional rng, std::string recipe);
Tensor quantized_linear_dgrad(Tensor dy, Tensor w, Tensor splits, Optional rng, std::string recipe);
Tensor quantized_linear_wgrad(Tensor dy, Tensor x, Tensor splits, Optional rng, std::string recipe);
void quantized_linear_wgrad_acc(Tensor dy, Tensor x, Tensor splits, Tensor main_grad, Optional beta,
                                Optional rng, std::string recipe);

// ---- routing.cpp.
// {weights float32 [T, K], idx int32 [T, K], counts int64 [E]}.
std::tuple<Tensor, Tensor, Tensor> router(Tensor logits, Optional bias, Optional mask,
                                          Optional given_idx, int64_t top_k, std::string score,
                                          bool renormalize, double scale, int64_t groups,
                                          int64_t group_top_k);
Tensor router_backward(Tensor logits, Tensor idx, Tensor dweight, std::string score,
                       bool renormalize, double scale);
// {splits int64 [E], source int32 [T*K], row_tk int32 [T, K], slot_w float32 [T*K], without w [0]}.
std::tuple<Tensor, Tensor, Tensor, Tensor> expert_rows(Tensor idx, Optional w, int64_t num_experts);
void router_update_bias(Tensor bias, Tensor counts, double rate);

// ---- quantized.cpp: formats by the core's names (formats/quantized.h). Arrays of bytes are uint8,
// flags int32; an array that the format does not have, or that is not asked for, is empty ([0]).
// {row_data, row_scales, col_data, col_scales, amax, tensor_scale, flags}; `rng` is {seed, draw},
// int64 [2], for stochastic rounding; with `splits` every group is a tensor of its own.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> quantize(
    Tensor x, Optional rng, Optional splits, Optional amax, std::string format, std::string element,
    bool pow2, bool row_scaled, bool rht, bool row, bool col, int64_t tensor_id);
Tensor compute_amax(Tensor x, Optional splits, std::string format, std::string element, bool pow2,
                    bool row_scaled, bool rht);
Tensor dequantize(Tensor row_data, Tensor row_scales, Tensor col_data, Tensor col_scales,
                  Tensor tensor_scale, std::string format, std::string element, bool pow2,
                  bool row_scaled, bool rht, int64_t rows, int64_t cols, std::string direction,
                  bool undo_rht, bool bfloat16);
// {col_data, amax, tensor_scale}. On a GPU its table takes memory of the core's and waits.
std::tuple<Tensor, Tensor, Tensor> transpose_quantized(Tensor row_data, Tensor row_scales,
                                                       Tensor amax, Tensor tensor_scale,
                                                       std::string format, std::string element,
                                                       bool pow2, int64_t rows, int64_t cols);
Tensor convert_scales(Tensor scales, Tensor tensor_scale, std::string format, std::string element,
                      bool pow2, bool rht, int64_t rows, int64_t cols, std::string direction,
                      std::string layout);

}  // namespace moiety::torch_ops
