// The schemas of torch.ops.moiety, and the kernels, which are the same functions for the CPU and for
// CUDA: where a call runs its first tensor says (call.h). Gradients, fake kernels and vmap's
// refusal are registered in Python (moiety/_register.py), and moiety/ops.py has defaults: of an
// argument that is left to a default of the schema autograd learns nothing.
#include "python/csrc/operators.h"

#define MOIETY_ACTIVATION "str kind, float alpha, float limit, float offset, int interleave"
#define MOIETY_SPEC "str format, str element, bool pow2"
#define MOIETY_MLP                                                                             \
  "Tensor x, Tensor w1, Tensor w2, Tensor splits, Tensor? row_scale, Tensor? source, Tensor? " \
  "row_tk, Tensor? b1, Tensor? b2, " MOIETY_ACTIVATION

namespace moiety::torch_ops {
namespace {

template <class Library>
void add_schemas(Library& m) {
  m.def(
      "grouped_linear(Tensor x, Tensor w, Tensor splits, Tensor? bias, "
      "Tensor? row_scale, Tensor? main_grad) -> Tensor");
  m.def(
      "grouped_linear_out(Tensor x, Tensor w, Tensor splits, Tensor? bias, Tensor? row_scale, "
      "Tensor(a!) out) -> ()");
  m.def("grouped_linear_t(Tensor x, Tensor w, Tensor splits) -> Tensor");
  m.def("grouped_linear_dgrad(Tensor dy, Tensor w, Tensor splits) -> Tensor");
  m.def(
      "grouped_linear_wgrad(Tensor dy, Tensor x, Tensor splits, Tensor? dy_source, "
      "Tensor? x_source) -> Tensor");
  m.def(
      "grouped_linear_wgrad_acc(Tensor dy, Tensor x, Tensor splits, Tensor? dy_source, "
      "Tensor? x_source, Tensor(a!) main_grad, Tensor? beta) -> ()");
  m.def(
      "grouped_linear_bias_grad(Tensor dy, Tensor splits, Tensor bias, Tensor? row_scale) -> "
      "(Tensor, Tensor)");
  m.def("grouped_mlp(" MOIETY_MLP ", Tensor? main_grad1, Tensor? main_grad2) -> (Tensor, Tensor)");
  m.def("grouped_mlp_backward(Tensor dy, Tensor h, " MOIETY_MLP
        ", bool need_dx) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("activation(Tensor h, Tensor? splits, Tensor? row_scale, " MOIETY_ACTIVATION ") -> Tensor");
  m.def(
      "activation_backward(Tensor da, Tensor h, Tensor? splits, Tensor? "
      "row_scale, " MOIETY_ACTIVATION ") -> (Tensor, Tensor)");
  m.def(
      "quantized_linear(Tensor x, Tensor w, Tensor splits, Tensor? bias, Tensor? row_scale, "
      "Tensor? main_grad, Tensor? rng, str recipe) -> Tensor");
  m.def(
      "quantized_linear_dgrad(Tensor dy, Tensor w, Tensor splits, Tensor? rng, str recipe) -> "
      "Tensor");
  m.def(
      "quantized_linear_wgrad(Tensor dy, Tensor x, Tensor splits, Tensor? rng, str recipe) -> "
      "Tensor");
  m.def(
      "quantized_linear_wgrad_acc(Tensor dy, Tensor x, Tensor splits, Tensor(a!) main_grad, "
      "Tensor? beta, Tensor? rng, str recipe) -> ()");
  m.def(
      "router(Tensor logits, Tensor? bias, Tensor? mask, Tensor? given_idx, int top_k, str score, "
      "bool renormalize, float scale, int groups, int group_top_k) -> (Tensor, Tensor, Tensor)");
  m.def(
      "router_backward(Tensor logits, Tensor idx, Tensor dweight, str score, bool renormalize, "
      "float scale) -> Tensor");
  m.def("expert_rows(Tensor idx, Tensor? w, int num_experts) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("router_update_bias(Tensor(a!) bias, Tensor counts, float rate) -> ()");
  m.def("quantize(Tensor x, Tensor? rng, Tensor? splits, Tensor? amax, " MOIETY_SPEC
        ", bool row_scaled, bool rht, bool row, bool col, int tensor_id) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("compute_amax(Tensor x, Tensor? splits, " MOIETY_SPEC
        ", bool row_scaled, bool rht) -> Tensor");
  m.def(
      "dequantize(Tensor row_data, Tensor row_scales, Tensor col_data, Tensor col_scales, "
      "Tensor tensor_scale, " MOIETY_SPEC
      ", bool row_scaled, bool rht, int rows, int cols, str direction, bool undo_rht, "
      "bool bfloat16) -> Tensor");
  m.def(
      "transpose_quantized(Tensor row_data, Tensor row_scales, Tensor amax, "
      "Tensor tensor_scale, " MOIETY_SPEC ", int rows, int cols) -> (Tensor, Tensor, Tensor)");
  m.def("convert_scales(Tensor scales, Tensor tensor_scale, " MOIETY_SPEC
        ", bool rht, int rows, int cols, str direction, str layout) -> Tensor");
}

template <class Library>
void add_kernels(Library& m) {
  m.impl("grouped_linear", TORCH_BOX(&grouped_linear));
  m.impl("grouped_linear_out", TORCH_BOX(&grouped_linear_out));
  m.impl("grouped_linear_t", TORCH_BOX(&grouped_linear_t));
  m.impl("grouped_linear_dgrad", TORCH_BOX(&grouped_linear_dgrad));
  m.impl("grouped_linear_wgrad", TORCH_BOX(&grouped_linear_wgrad));
  m.impl("grouped_linear_wgrad_acc", TORCH_BOX(&grouped_linear_wgrad_acc));
  m.impl("grouped_linear_bias_grad", TORCH_BOX(&grouped_linear_bias_grad));
  m.impl("grouped_mlp", TORCH_BOX(&grouped_mlp));
  m.impl("grouped_mlp_backward", TORCH_BOX(&grouped_mlp_backward));
  m.impl("activation", TORCH_BOX(&activation));
  m.impl("activation_backward", TORCH_BOX(&activation_backward));
  m.impl("quantized_linear", TORCH_BOX(&quantized_linear));
  m.impl("quantized_linear_dgrad", TORCH_BOX(&quantized_linear_dgrad));
  m.impl("quantized_linear_wgrad", TORCH_BOX(&quantized_linear_wgrad));
  m.impl("quantized_linear_wgrad_acc", TORCH_BOX(&quantized_linear_wgrad_acc));
  m.impl("router", TORCH_BOX(&router));
  m.impl("router_backward", TORCH_BOX(&router_backward));
  m.impl("expert_rows", TORCH_BOX(&expert_rows));
  m.impl("router_update_bias", TORCH_BOX(&router_update_bias));
  m.impl("quantize", TORCH_BOX(&quantize));
  m.impl("compute_amax", TORCH_BOX(&compute_amax));
  m.impl("dequantize", TORCH_BOX(&dequantize));
  m.impl("transpose_quantized", TORCH_BOX(&transpose_quantized));
  m.impl("convert_scales", TORCH_BOX(&convert_scales));
}

}  // namespace
}  // namespace moiety::torch_ops

STABLE_TORCH_LIBRARY(moiety, m) { moiety::torch_ops::add_schemas(m); }
STABLE_TORCH_LIBRARY_IMPL(moiety, CPU, m) { moiety::torch_ops::add_kernels(m); }
STABLE_TORCH_LIBRARY_IMPL(moiety, CUDA, m) { moiety::torch_ops::add_kernels(m); }
// The same without gradients: a call that has none does not pass by the formulas of the above.
STABLE_TORCH_LIBRARY(moiety_below, m) { moiety::torch_ops::add_schemas(m); }
STABLE_TORCH_LIBRARY_IMPL(moiety_below, CPU, m) { moiety::torch_ops::add_kernels(m); }
STABLE_TORCH_LIBRARY_IMPL(moiety_below, CUDA, m) { moiety::torch_ops::add_kernels(m); }
