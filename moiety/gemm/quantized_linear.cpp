#include "moiety/gemm/quantized_linear.h"

#include <algorithm>

namespace moiety::gemm {
namespace {

// A dense weight as the only expert of a layer.
Operand dense(Operand w) {
  w.data = w.data.select(0);
  if (w.scale.block.defined()) w.scale.block = w.scale.block.select(0);
  return w;
}

OperandCast input_cast(const QuantizedLinear& linear) { return {.delayed = linear.input_scaling}; }
OperandCast gradient_cast(const QuantizedLinear& linear) {
  return {.random = linear.gradient_bits, .delayed = linear.gradient_scaling};
}

void check_rows(const char* operation, const QuantizedLinear& linear, const TensorView& x,
                int64_t columns) {
  MOIETY_CHECK(linear.recipe, "{}: no recipe", operation);
  check_tensor(operation, "rows", x, DType::kBFloat16, {-1, columns});
}

// The product with a dense or grouped weight operand, which may lie transposed.
void multiply(const Operand& a, const Operand& w, TensorView out, TensorView addend,
              Stream stream) {
  gemm({.op = w.transposed ? GemmOp::kTN : GemmOp::kNN,
        .a = a.data,
        .b = w.data,
        .out = out,
        .beta = addend.defined() ? 1.0f : 0.0f,
        .c = addend,
        .a_scale = a.scale,
        .b_scale = w.scale},
       stream);
}

Operand forward_operand(const QuantizedLinear& linear, const Groups& groups, const GroupedTensor& x,
                        Arena& arena, Stream stream) {
  const QuantSpec& spec = linear.recipe->input;
  const QuantizedView& rows = linear.rows;
  if (!rows.row_data.defined()) {
    return make_grouped_operand(spec, Direction::kRow, x, groups, input_cast(linear), arena,
                                stream);
  }
  const int64_t count = x.source_R.defined() ? x.data.size(0) : groups.capacity;
  MOIETY_CHECK(rows.spec == spec && rows.rows == count && rows.cols == x.data.size(1),
               "quantized_grouped_forward: rows are {} [{}, {}], expected {} [{}, {}]",
               name(rows.spec.format), rows.rows, rows.cols, name(spec.format), count,
               x.data.size(1));
  return make_row_operand(rows, x.source_R, arena, stream);
}

}  // namespace

void quantized_forward(const QuantizedLinear& linear, TensorView x, TensorView y,
                       TensorView residual, Arena& arena, Stream stream) {
  check_rows("quantized_forward", linear, x, linear.weight.columns());
  ArenaScope operands(arena);
  Operand w = dense(
      make_weight_operand(linear.recipe->weight, Direction::kRow, linear.weight, arena, stream));
  w.transposed = true;
  multiply(
      make_operand(linear.recipe->input, Direction::kRow, x, input_cast(linear), arena, stream), w,
      y, residual, stream);
}

void quantized_input_gradient(const QuantizedLinear& linear, TensorView dy, TensorView dx,
                              TensorView addend, Arena& arena, Stream stream) {
  check_rows("quantized_input_gradient", linear, dy, linear.weight.rows());
  ArenaScope operands(arena);
  const Operand w = dense(
      make_weight_operand(linear.recipe->weight, Direction::kCol, linear.weight, arena, stream));
  multiply(make_operand(linear.recipe->gradient, Direction::kRow, dy, gradient_cast(linear), arena,
                        stream),
           w, dx, addend, stream);
}

void quantized_weight_gradient(const QuantizedLinear& linear, TensorView dy, TensorView x,
                               TensorView grad, bool accumulate, Arena& arena, Stream stream) {
  check_rows("quantized_weight_gradient", linear, dy, grad.size(0));
  check_rows("quantized_weight_gradient", linear, x, grad.size(1));
  ArenaScope operands(arena);
  const Operand a = make_operand(linear.recipe->gradient, Direction::kCol, dy,
                                 gradient_cast(linear), arena, stream);
  const Operand b =
      make_operand(linear.recipe->input, Direction::kCol, x, input_cast(linear), arena, stream);
  gemm({.op = a.transposed ? GemmOp::kTN : GemmOp::kNT,
        .a = a.data,
        .b = b.data,
        .out = grad,
        .beta = accumulate ? 1.0f : 0.0f,
        .a_scale = a.scale,
        .b_scale = b.scale},
       stream);
}

LinearBytes quantized_linear_bytes(const Recipe& r, const LinearSize& s) {
  const int64_t matrices = std::max<int64_t>(s.experts, 1);
  const auto x = [&](Direction direction) {
    return operand_bytes(r.input, direction, s.rows, s.k, s.experts, s.x_sources);
  };
  const auto dy = [&](Direction direction) {
    return operand_bytes(r.gradient, direction, s.rows, s.n, s.experts, s.dy_sources);
  };
  const auto product = [&](Direction direction, const OperandBytes& rows) {
    const OperandBytes w =
        weight_operand_bytes(r.weight, direction, s.n, s.k, matrices, s.in_format);
    return std::max(w.peak, w.kept + rows.peak);
  };
  const OperandBytes a = dy(Direction::kCol);
  OperandBytes b = x(Direction::kCol);
  if (s.x_columns) b.peak = b.kept;
  return {product(Direction::kRow, x(Direction::kRow)),
          product(Direction::kCol, dy(Direction::kRow)), std::max(a.peak, a.kept + b.peak)};
}

void make_columns(const QuantizedLinear& linear, const Groups& groups, const GroupedTensor& x,
                  const QuantizedView& columns, Arena& arena, Stream stream) {
  check_rows("make_columns", linear, x.data, columns.cols);
  MOIETY_CHECK(columns.spec == linear.recipe->input, "make_columns: columns are {}, expected {}",
               name(columns.spec.format), name(linear.recipe->input.format));
  fill_columns(columns, x, linear.rows, groups, input_cast(linear), arena, stream);
}

void quantized_grouped_forward(const QuantizedLinear& linear, const Groups& groups,
                               const GroupedTensor& x, TensorView y, TensorView bias_EN,
                               TensorView bias_scale_R, Arena& arena, Stream stream) {
  check_rows("quantized_grouped_forward", linear, x.data, linear.weight.columns());
  ArenaScope operands(arena);
  const Operand w =
      make_weight_operand(linear.recipe->weight, Direction::kRow, linear.weight, arena, stream);
  const Operand a = forward_operand(linear, groups, x, arena, stream);
  grouped_gemm({.op = GroupedOp::kForward,
                .groups = groups,
                .a = {a.data, a.source_R},
                .w = w.data,
                .out = y,
                .bias_EN = bias_EN,
                .bias_scale_R = bias_scale_R,
                .a_scale = a.scale,
                .b_scale = w.scale,
                .sm_limit = linear.sm_limit},
               stream);
}

void quantized_grouped_input_gradient(const QuantizedLinear& linear, const Groups& groups,
                                      const GroupedTensor& dy, TensorView dx, Arena& arena,
                                      Stream stream) {
  check_rows("quantized_grouped_input_gradient", linear, dy.data, linear.weight.rows());
  ArenaScope operands(arena);
  const Operand w =
      make_weight_operand(linear.recipe->weight, Direction::kCol, linear.weight, arena, stream);
  const Operand a = make_grouped_operand(linear.recipe->gradient, Direction::kRow, dy, groups,
                                         gradient_cast(linear), arena, stream);
  grouped_gemm({.op = w.transposed ? GroupedOp::kForward : GroupedOp::kDgrad,
                .groups = groups,
                .a = {a.data, a.source_R},
                .w = w.data,
                .out = dx,
                .a_scale = a.scale,
                .b_scale = w.scale,
                .sm_limit = linear.sm_limit},
               stream);
}

void quantized_grouped_weight_gradient(const QuantizedLinear& linear, const Groups& groups,
                                       const GroupedTensor& dy, const GroupedTensor& x,
                                       const GroupedWeight& grad, const GroupScalar& beta,
                                       Arena& arena, Stream stream) {
  check_rows("quantized_grouped_weight_gradient", linear, dy.data, linear.weight.rows());
  check_rows("quantized_grouped_weight_gradient", linear, x.data, linear.weight.columns());
  ArenaScope operands(arena);
  const Recipe& recipe = *linear.recipe;
  const Operand a = make_grouped_operand(recipe.gradient, Direction::kCol, dy, groups,
                                         gradient_cast(linear), arena, stream);
  const Operand b = linear.columns.col_data.defined()
                        ? make_column_operand(linear.columns, groups, arena, stream)
                        : make_grouped_operand(recipe.input, Direction::kCol, x, groups,
                                               input_cast(linear), arena, stream);
  grouped_gemm({.op = GroupedOp::kWgrad,
                .groups = grouped_operand_groups(recipe.input, groups, arena, stream),
                .a = {a.data},
                .b = {b.data},
                .w = grad,
                .beta = beta,
                .transposed = a.transposed,
                .a_scale = a.scale,
                .b_scale = b.scale,
                .sm_limit = linear.sm_limit},
               stream);
}

}  // namespace moiety::gemm
