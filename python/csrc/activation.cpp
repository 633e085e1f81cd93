#include "moiety/gemm/grouped_mlp.h"
#include "python/csrc/operators.h"

namespace moiety::torch_ops {
namespace {

// The arguments that forward and backward share; `ffn` is F, the columns of A. Dead rows of `results`
// become zero.
gemm::ActivationArgs arguments(Call& call, const Tensor& h, const Optional& splits,
                               const Optional& row_scale, const gemm::Activation& activation,
                               int64_t interleave, int64_t ffn,
                               std::initializer_list<TensorView> results) {
  gemm::ActivationArgs args;
  args.activation = activation;
  args.interleave = interleave;
  args.h = call.view("h", h, call.operand("h", h), {-1, activation.hidden(ffn)});
  if (splits) args.groups = call.groups(*splits, args.h.size(0), results);
  args.prob_R = call.whole("row_scale", row_scale, DType::kFloat32, {args.h.size(0)});
  return args;
}

int64_t ffn_of(const Call& call, const Tensor& h, const gemm::Activation& activation) {
  MOIETY_CHECK(h.dim() == 2 && (!activation.gated() || h.size(1) % 2 == 0),
               "moiety::{}: h is {}, expected [R, {}]", call.name(), view_of(h).describe(),
               activation.gated() ? "2F" : "F");
  return activation.gated() ? h.size(1) / 2 : h.size(1);
}

}  // namespace

Tensor activation(Tensor h, Optional splits, Optional row_scale, std::string kind, double alpha,
                  double limit, double offset, int64_t interleave) {
  return guarded("activation", [&] {
    Call call("activation", h);
    const gemm::Activation what = activation_of(call, kind, alpha, limit, offset);
    const int64_t ffn = ffn_of(call, h, what);
    const Tensor a = call.empty({h.size(0), ffn}, h.scalar_type());
    const TensorView out = view_of(a);
    gemm::activation_forward(arguments(call, h, splits, row_scale, what, interleave, ffn, {out}),
                             out, call.stream());
    return a;
  });
}

std::tuple<Tensor, Tensor> activation_backward(Tensor da, Tensor h, Optional splits,
                                               Optional row_scale, std::string kind, double alpha,
                                               double limit, double offset, int64_t interleave) {
  return guarded("activation_backward", [&] {
    Call call("activation_backward", h);
    const gemm::Activation what = activation_of(call, kind, alpha, limit, offset);
    const int64_t rows = h.size(0), ffn = ffn_of(call, h, what);
    const Tensor dh = call.empty({rows, h.size(1)}, h.scalar_type());
    const Tensor dscale = call.empty({row_scale ? rows : 0}, ScalarType::Float);
    const TensorView dh_RH = view_of(dh), dscale_R = row_scale ? view_of(dscale) : TensorView();
    const auto args =
        arguments(call, h, splits, row_scale, what, interleave, ffn, {dh_RH, dscale_R});
    gemm::activation_backward(args, call.view("da", da, args.h.dtype(), {rows, ffn}), dh_RH, {},
                              dscale_R, call.stream());
    return std::tuple(dh, dscale);
  });
}

}  // namespace moiety::torch_ops
