#include "moiety/gemm/grouped_gemm.h"
#include "moiety/gemm/grouped_mlp.h"
#include "python/csrc/operators.h"

namespace moiety::torch_ops {
namespace {

// The rows of a gradient or an input, read where they lie or through `source`.
gemm::GroupedTensor rows_of(const Call& call, const char* argument, const Tensor& x, DType dtype,
                            const char* source_name, const Optional& source, int64_t capacity) {
  const TensorView map = call.whole(source_name, source, DType::kInt32, {capacity});
  return {call.view(argument, x, dtype, {map.defined() ? -1 : capacity, -1}), map};
}

void linear(Call& call, const Tensor& x, const Tensor& w, const Tensor& splits,
            const Optional& bias, const Optional& row_scale, const Tensor& out, bool zero) {
  const DType dtype = call.operand("x", x, "w", w);
  const TensorView x_RC = call.view("x", x, dtype, {-1, -1});
  const int64_t rows = x_RC.size(0), columns = x_RC.size(1);
  MOIETY_CHECK(w.dim() == 3 && w.size(2) == columns,
               "moiety::{}: x has {} columns, w {} expects {}", call.name(), columns,
               view_of(w).describe(), w.dim() == 3 ? w.size(2) : 0);
  call.check_experts(splits, "w", w);
  const TensorView w_ENC = call.view("w", w, dtype, {-1, -1, columns});
  gemm::GroupedGemmArgs args;
  args.out = call.view("out", out, dtype, {rows, w_ENC.size(1)});
  args.groups = call.groups(splits, rows, {zero ? args.out : TensorView()});
  args.a = {x_RC, {}};
  args.w = w_ENC;
  args.bias_EN = call.whole("bias", bias, dtype, {args.groups.experts, w_ENC.size(1)});
  args.bias_scale_R = call.whole("row_scale", row_scale, DType::kFloat32, {rows});
  MOIETY_CHECK(bias.has_value() || !row_scale.has_value(),
               "moiety::{}: row_scale scales the bias, and there is none", call.name());
  gemm::grouped_gemm(args, call.stream());
}

void wgrad(Call& call, const Tensor& dy, const Tensor& x, const Tensor& splits,
           const Optional& dy_source, const Optional& x_source, const Tensor& out,
           const Optional& beta, float otherwise) {
  const DType dtype = call.operand("x", x);
  const int64_t rows = dy_source ? dy_source->size(0) : dy.size(0);
  gemm::GroupedGemmArgs args;
  args.op = gemm::GroupedOp::kWgrad;
  args.groups = call.groups(splits, rows);
  args.a = rows_of(call, "dy", dy, dtype, "dy_source", dy_source, rows);
  args.b = rows_of(call, "x", x, dtype, "x_source", x_source, rows);
  const DType target = call.operand("main_grad", out);
  args.w = call.view("main_grad", out, target,
                     {args.groups.experts, args.a.data.size(1), args.b.data.size(1)});
  args.beta = {otherwise, call.whole("beta", beta, DType::kFloat32, {1})};
  gemm::grouped_gemm(args, call.stream());
  call.check_data();
}

}  // namespace

Tensor grouped_linear(Tensor x, Tensor w, Tensor splits, Optional bias, Optional row_scale,
                      Optional /*main_grad*/) {
  return guarded("grouped_linear", [&] {
    Call call("grouped_linear", x);
    MOIETY_CHECK(
        x.dim() == 2 && w.dim() == 3 && splits.dim() == 1,
        "moiety::grouped_linear: x is {}, w {}, splits {}, expected [R, C], [E, N, C], [E]",
        view_of(x).describe(), view_of(w).describe(), view_of(splits).describe());
    const Tensor out = call.empty({x.size(0), w.size(1)}, x.scalar_type());
    linear(call, x, w, splits, bias, row_scale, out, true);
    return out;
  });
}

void grouped_linear_out(Tensor x, Tensor w, Tensor splits, Optional bias, Optional row_scale,
                        Tensor out) {
  guarded("grouped_linear_out", [&] {
    Call call("grouped_linear_out", x);
    linear(call, x, w, splits, bias, row_scale, out, false);
  });
}

namespace {

// Rows times matrices [E, columns of x, N]: the product of dgrad.
Tensor times(const char* name, const char* argument, const Tensor& dy, const Tensor& w,
             const Tensor& splits) {
  return guarded(name, [&] {
    Call call(name, dy);
    const DType dtype = call.operand(argument, dy, "w", w);
    const TensorView w_ENC = call.view("w", w, dtype, {-1, -1, -1});
    call.check_experts(splits, "w", w);
    const int64_t rows = dy.size(0);
    const Tensor out = call.empty({rows, w_ENC.size(2)}, w.scalar_type());
    gemm::GroupedGemmArgs args;
    args.op = gemm::GroupedOp::kDgrad;
    args.out = view_of(out);
    args.groups = call.groups(splits, rows, {args.out});
    args.a = {call.view(argument, dy, dtype, {rows, w_ENC.size(1)}), {}};
    args.w = w_ENC;
    gemm::grouped_gemm(args, call.stream());
    return out;
  });
}

}  // namespace

Tensor grouped_linear_t(Tensor x, Tensor w, Tensor splits) {
  return times("grouped_linear_t", "x", x, w, splits);
}

Tensor grouped_linear_dgrad(Tensor dy, Tensor w, Tensor splits) {
  return times("grouped_linear_dgrad", "dy", dy, w, splits);
}

Tensor grouped_linear_wgrad(Tensor dy, Tensor x, Tensor splits, Optional dy_source,
                            Optional x_source) {
  return guarded("grouped_linear_wgrad", [&] {
    Call call("grouped_linear_wgrad", x);
    const Tensor out = call.empty({splits.size(0), dy.size(1), x.size(1)}, x.scalar_type());
    wgrad(call, dy, x, splits, dy_source, x_source, out, {}, 0);
    return out;
  });
}

void grouped_linear_wgrad_acc(Tensor dy, Tensor x, Tensor splits, Optional dy_source,
                              Optional x_source, Tensor main_grad, Optional beta) {
  guarded("grouped_linear_wgrad_acc", [&] {
    Call call("grouped_linear_wgrad_acc", x);
    wgrad(call, dy, x, splits, dy_source, x_source, main_grad, beta, 1);
  });
}

std::tuple<Tensor, Tensor> grouped_linear_bias_grad(Tensor dy, Tensor splits, Tensor bias,
                                                    Optional row_scale) {
  return guarded("grouped_linear_bias_grad", [&] {
    Call call("grouped_linear_bias_grad", dy);
    const DType dtype = call.operand("bias", bias);
    const int64_t rows = dy.size(0), experts = bias.size(0), columns = bias.size(1);
    const gemm::Groups groups = call.groups(splits, rows);
    const gemm::GroupedTensor dy_RN = {call.view("dy", dy, dtype, {rows, columns}), {}};
    const TensorView scale = call.whole("row_scale", row_scale, DType::kFloat32, {rows});
    const TensorView bias_EN = call.whole("bias", bias, dtype, {groups.experts, columns});
    const Tensor dbias = call.empty({experts, columns}, bias.scalar_type());
    const Tensor dscale = call.empty({row_scale ? rows : 0}, ScalarType::Float);
    gemm::grouped_bias_grad({groups, dy_RN, scale, view_of(dbias), {}}, call.stream());
    if (row_scale) {
      gemm::grouped_scale_grad({groups, dy_RN, bias_EN, view_of(dscale), false}, call.stream());
      gemm::zero_dead_rows(groups, view_of(dscale), call.stream());
    }
    return std::tuple(dbias, dscale);
  });
}

namespace {

// The arguments that forward and backward of the MLP share.
struct Mlp {
  gemm::GroupedMlp mlp;
  gemm::MlpInput input;
  DType dtype;
  int64_t rows, model, ffn, hidden;

  struct Arguments {
    const Tensor &x, &w1, &w2, &splits;
    const Optional &row_scale, &source, &row_tk, &b1, &b2;
    gemm::Activation activation;
    int64_t interleave;
  };

  Mlp(Call& call, const Arguments& a) : dtype(call.operand("x", a.x, "w1", a.w1)) {
    const TensorView x = call.view("x", a.x, dtype, {-1, -1});
    rows = a.source ? a.source->size(0) : x.size(0);
    model = x.size(1);
    const TensorView w2 = call.view("w2", a.w2, dtype, {-1, model, -1});
    const int64_t experts = w2.size(0);
    ffn = w2.size(2);
    hidden = a.activation.hidden(ffn);
    mlp.activation = a.activation;
    mlp.interleave = a.interleave;
    mlp.w1 = call.view("w1", a.w1, dtype, {experts, hidden, model});
    mlp.w2 = w2;
    mlp.b1_EH = call.whole("b1", a.b1, dtype, {experts, hidden});
    mlp.b2_ED = call.whole("b2", a.b2, dtype, {experts, model});
    call.check_experts(a.splits, "w1", a.w1);
    input.groups.experts = experts;
    input.groups.capacity = rows;
    input.x = x;
    input.prob_R = call.whole("row_scale", a.row_scale, DType::kFloat32, {rows});
    input.source_R = call.whole("source", a.source, DType::kInt32, {rows});
    input.row_TK = call.whole("row_tk", a.row_tk, DType::kInt32, {x.size(0), -1});
    MOIETY_CHECK(a.source || !a.row_tk, "moiety::{}: row_tk goes with source", call.name());
    if (experts > 0 && model > 0 && ffn > 0) {
      const auto report =
          gemm::choose_grouped_mlp({dtype, model, ffn, a.interleave}, call.device());
      mlp.path = report.path;
      mlp.fused = report.fused;
    } else if (call.device().type == DeviceType::kCuda) {  // nothing is multiplied
      mlp.path = gemm::MlpPath::kCudaPlain;
    }
  }
  // The groups' rows and the work area; dead rows of `results` become zero.
  void prepare(Call& call, const Tensor& splits, std::initializer_list<TensorView> results) {
    input.groups = call.groups(splits, rows, results, gemm::grouped_mlp_workspace(mlp, input));
  }
  int64_t results() const { return input.row_TK.defined() ? input.x.size(0) : rows; }
};

}  // namespace

std::tuple<Tensor, Tensor> grouped_mlp(Tensor x, Tensor w1, Tensor w2, Tensor splits,
                                       Optional row_scale, Optional source, Optional row_tk,
                                       Optional b1, Optional b2, std::string kind, double alpha,
                                       double limit, double offset, int64_t interleave,
                                       Optional /*main_grad1*/, Optional /*main_grad2*/) {
  return guarded("grouped_mlp", [&] {
    Call call("grouped_mlp", x);
    Mlp m(call, {x, w1, w2, splits, row_scale, source, row_tk, b1, b2,
                 activation_of(call, kind, alpha, limit, offset), interleave});
    const Tensor y = call.empty({m.results(), m.model}, x.scalar_type());
    const Tensor h = call.empty({m.rows, m.hidden}, x.scalar_type());
    const TensorView h_RH = view_of(h), y_D = view_of(y);
    m.prepare(call, splits, {h_RH, row_tk ? TensorView() : y_D});
    gemm::grouped_mlp_forward(m.mlp, m.input, h_RH, y_D, call.work_area(), call.stream());
    call.check_data();
    return std::tuple(y, h);
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> grouped_mlp_backward(
    Tensor dy, Tensor h, Tensor x, Tensor w1, Tensor w2, Tensor splits, Optional row_scale,
    Optional source, Optional row_tk, Optional b1, Optional b2, std::string kind, double alpha,
    double limit, double offset, int64_t interleave, bool need_dx) {
  return guarded("grouped_mlp_backward", [&] {
    Call call("grouped_mlp_backward", x);
    Mlp m(call, {x, w1, w2, splits, row_scale, source, row_tk, b1, b2,
                 activation_of(call, kind, alpha, limit, offset), interleave});
    MOIETY_CHECK(row_tk || !source,
                 "moiety::grouped_mlp_backward: rows that are read through source go back through "
                 "row_tk, which is absent");
    const ScalarType type = x.scalar_type();
    const int64_t experts = m.input.groups.experts;
    const Tensor dx = need_dx ? call.empty({m.results(), m.model}, type) : call.absent(type);
    const Tensor dscale = call.empty({row_scale ? m.rows : 0}, ScalarType::Float);
    const Tensor db1 = b1 ? call.empty({experts, m.hidden}, type) : call.absent(type);
    const Tensor db2 = b2 ? call.empty({experts, m.model}, type) : call.absent(type);
    const Tensor dh = call.empty({m.rows, m.hidden}, type), a = call.empty({m.rows, m.ffn}, type);
    const auto given = [](const Tensor& t, bool is) { return is ? view_of(t) : TensorView(); };
    gemm::MlpGradients g;
    g.d_o = call.view("dy", dy, m.dtype, {m.results(), m.model});
    g.h = call.view("h", h, m.dtype, {m.rows, m.hidden});
    g.dh = view_of(dh);
    g.a = view_of(a);
    g.dx = given(dx, need_dx);
    g.dprob_R = given(dscale, row_scale.has_value());
    g.db1_EH = given(db1, b1.has_value());
    g.db2_ED = given(db2, b2.has_value());
    m.prepare(call, splits, {g.dh, g.a, g.dprob_R, row_tk ? TensorView() : g.dx});
    gemm::grouped_mlp_backward_data(m.mlp, m.input, g, call.work_area(), call.stream());
    call.check_data();
    return std::tuple(dx, dscale, db1, db2, dh, a);
  });
}

}  // namespace moiety::torch_ops
