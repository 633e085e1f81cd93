#include "moiety/gemm/quantized_mlp.h"

#include "moiety/gemm/mlp_steps.h"

namespace moiety::gemm {
namespace {

void check(const QuantizedMlp& mlp, const MlpInput& input) {
  MOIETY_CHECK(!input.row_TK.defined() || input.source_R.defined(),
               "quantized_mlp: row_TK is {}, its inverse source_R is missing",
               input.row_TK.describe());
  const int64_t experts = input.groups.experts,
                hidden = mlp.activation.hidden(mlp.fc2.weight.columns());
  MOIETY_CHECK(
      mlp.fc1.weight.experts() == experts && mlp.fc2.weight.experts() == experts &&
          mlp.fc1.weight.rows() == hidden && mlp.fc1.weight.columns() == mlp.fc2.weight.rows(),
      "quantized_mlp: fc1 is {} x [{}, {}], fc2 {} x [{}, {}], expected {} experts and "
      "{} rows of fc1",
      mlp.fc1.weight.experts(), mlp.fc1.weight.rows(), mlp.fc1.weight.columns(),
      mlp.fc2.weight.experts(), mlp.fc2.weight.rows(), mlp.fc2.weight.columns(), experts, hidden);
}

ActivationArgs activation(const QuantizedMlp& mlp, const MlpInput& input, const TensorView& h) {
  return {.activation = mlp.activation,
          .interleave = mlp.interleave,
          .groups = input.groups,
          .h = h,
          .prob_R = input.prob_R};
}

// Where rows lie until those of a token are summed into `sums`; without row_TK that is their place.
TensorView rows_of(const MlpInput& input, const TensorView& sums, Arena& arena) {
  if (!input.row_TK.defined()) return sums;
  return arena.tensor(DType::kBFloat16, {input.groups.capacity, sums.size(1)});
}

void sum_rows_of(const MlpInput& input, const TensorView& rows, const TensorView& sums,
                 const Stream& stream) {
  if (!input.row_TK.defined()) return;
  sum_rows(rows, input.row_TK, sums, input.groups.status, stream);
}

TensorView activated(const QuantizedMlp& mlp, const MlpInput& input, Arena& arena) {
  return arena.tensor(DType::kBFloat16, {input.groups.capacity, mlp.fc2.weight.columns()});
}

}  // namespace

void quantized_mlp_forward(const QuantizedMlp& mlp, const MlpInput& input, TensorView h,
                           TensorView o, Arena& arena, Stream stream) {
  check(mlp, input);
  ArenaScope temporaries(arena);
  const TensorView a = activated(mlp, input, arena);
  quantized_mlp_hidden(mlp, input, h, arena, stream);
  activation_forward(activation(mlp, input, h), a, stream);
  const TensorView y = rows_of(input, o, arena);
  quantized_grouped_forward(mlp.fc2, input.groups, {a}, y, mlp.b2_ED,
                            mlp.b2_ED.defined() ? input.prob_R : TensorView(), arena, stream);
  sum_rows_of(input, y, o, stream);
}

void quantized_mlp_hidden(const QuantizedMlp& mlp, const MlpInput& input, TensorView h,
                          Arena& arena, Stream stream) {
  check(mlp, input);
  quantized_grouped_forward(mlp.fc1, input.groups, {input.x, input.source_R}, h, mlp.b1_EH, {},
                            arena, stream);
}

void quantized_mlp_backward_data(const QuantizedMlp& mlp, const MlpInput& input,
                                 const MlpGradients& g, Arena& arena, Stream stream) {
  check(mlp, input);
  ArenaScope temporaries(arena);
  const TensorView da = activated(mlp, input, arena);
  quantized_grouped_input_gradient(mlp.fc2, input.groups, {g.d_o, input.source_R}, da, arena,
                                   stream);
  activation_backward(activation(mlp, input, g.h), da, g.dh, g.a, g.dprob_R, stream);
  if (g.dx.defined()) {
    const TensorView dx = rows_of(input, g.dx, arena);
    quantized_grouped_input_gradient(mlp.fc1, input.groups, {g.dh}, dx, arena, stream);
    sum_rows_of(input, dx, g.dx, stream);
  }
  mlp_bias_gradients(input, g, mlp.b2_ED, stream);
}

void quantized_mlp_backward_weights(const QuantizedMlp& mlp, const MlpInput& input,
                                    const MlpGradients& g, const GradTarget& w2,
                                    const GradTarget& w1, Arena& arena, Stream stream) {
  check(mlp, input);
  if (w2.grad.defined()) {
    quantized_grouped_weight_gradient(mlp.fc2, input.groups, {g.d_o, input.source_R}, {g.a},
                                      w2.grad, w2.beta, arena, stream);
  }
  if (w1.grad.defined()) {
    quantized_grouped_weight_gradient(mlp.fc1, input.groups, {g.dh}, {input.x, input.source_R},
                                      w1.grad, w1.beta, arena, stream);
  }
}

}  // namespace moiety::gemm
