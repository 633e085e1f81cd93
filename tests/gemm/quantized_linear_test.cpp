// Quantized linear layers against double-precision products of the dequantized operands, which are
// made here with the public quantizers, matrix by matrix.
#include "moiety/gemm/quantized_linear.h"

#include <functional>

#include <gtest/gtest.h>

#include "moiety/base/parallel.h"
#include "moiety/gemm/gemm_block.h"
#include "moiety/quant/dequantize.h"
#include "tests/gemm/quantized_cases.h"
#include "tests/support/error_of.h"

namespace moiety::gemm {
namespace {

quant::RngState rng{0x0123456789ABCDEF, 3};
constexpr uint32_t kTensor = 7;

// A matrix of doubles.
struct Matrix {
  int64_t rows = 0, cols = 0;
  std::vector<double> data;
  double at(int64_t i, int64_t j) const { return data[i * cols + j]; }
};

// x quantized and back: of the col direction transposed, with the rotated tail.
Matrix dequantized(const QuantSpec& spec, Direction direction, const TensorView& x,
                   const RandomBits& random) {
  const bool col = direction == Direction::kCol;
  const QuantizedTensor q(spec, x.size(0), x.size(1), {!col, col});
  quant::QuantizeOptions options;
  options.rng = random.rng;
  options.tensor_id = random.tensor_id;
  options.expert = random.expert;
  options.row0 = random.row0;
  options.full_rows = random.full_rows;
  quant::quantize(x, q, options, {});
  const bool transposed = col && !is_mxfp8(spec.format);
  const int64_t tail = spec.rht_col && col ? 16 : 1;
  Matrix m{x.size(0), x.size(1), {}};
  if (transposed) m = {x.size(1), (x.size(0) + tail - 1) / tail * tail, {}};
  const Tensor values(DType::kFloat32, {m.rows, m.cols});
  quant::dequantize(q, direction, values, {}, {});
  if (!col || transposed) {
    for (int64_t i = 0; i < m.rows * m.cols; ++i) m.data.push_back(values.data<float>()[i]);
    return m;
  }
  std::swap(m.rows, m.cols);
  for (int64_t i = 0; i < m.rows; ++i) {
    for (int64_t j = 0; j < m.cols; ++j) m.data.push_back(values.data<float>()[j * m.rows + i]);
  }
  return m;
}

// out = addend + a b^T, within what fp32 sums and one rounding may do.
void expect_product(const Matrix& a, const Matrix& b, const TensorView& addend,
                    const TensorView& out, const std::string& what) {
  ASSERT_EQ(a.cols, b.cols) << what;
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t j = 0; j < b.rows; ++j) {
      const double old = addend.defined() ? get(addend, i, j) : 0;
      double sum = old, magnitude = std::abs(old);
      for (int64_t k = 0; k < a.cols; ++k) {
        sum += a.at(i, k) * b.at(j, k);
        magnitude += std::abs(a.at(i, k) * b.at(j, k));
      }
      const double bound =
          half_ulp(out.dtype(), sum) + double(a.cols + 8) * 0x1p-23 * magnitude + 1e-37;
      ASSERT_NEAR(get(out, i, j), sum, bound) << what << " (" << i << ", " << j << ")";
    }
  }
}

class QuantizedLinears : public testing::TestWithParam<RecipeCase> {
 protected:
  const Recipe& recipe() const { return GetParam().recipe; }
  Arena arena{"test"};
};
INSTANTIATE_TEST_SUITE_P(Recipes, QuantizedLinears, testing::ValuesIn(recipe_cases()),
                         [](const auto& c) { return c.param.name; });

struct Shape {
  int64_t tokens, n, k;
};
constexpr Shape kShapes[] = {{1, 16, 16}, {33, 48, 80}, {150, 144, 272}, {128, 256, 128}};

TEST_P(QuantizedLinears, ProductsAreThoseOfDequantizedOperands) {
  for (const Shape& s : kShapes) {
    const std::string what = text("T={} N={} K={}", s.tokens, s.n, s.k);
    const Tensor w = normal_tensor(DType::kBFloat16, {s.n, s.k}, 1);
    const Tensor x = activations(s.tokens, s.k, 2), dy = activations(s.tokens, s.n, 3);
    const Tensor residual = normal_tensor(DType::kBFloat16, {s.tokens, s.n}, 4);
    const RandomBits bits{&rng, kTensor, 0, 32, 32 + s.tokens};
    const QuantizedLinear linear{&recipe(), {{}, w}, bits};

    const Tensor y(DType::kBFloat16, {s.tokens, s.n});
    quantized_forward(linear, x, y, residual, arena, {});
    const Matrix w_row = dequantized(recipe().weight, Direction::kRow, w, {});
    expect_product(dequantized(recipe().input, Direction::kRow, x, {}), w_row, residual, y, what);

    const Tensor dx(DType::kFloat32, {s.tokens, s.k});
    quantized_input_gradient(linear, dy, dx, {}, arena, {});
    expect_product(dequantized(recipe().gradient, Direction::kRow, dy, bits),
                   dequantized(recipe().weight, Direction::kCol, w, {}), {}, dx, what + " dx");

    const Matrix dy_col = dequantized(recipe().gradient, Direction::kCol, dy, bits);
    const Matrix x_col = dequantized(recipe().input, Direction::kCol, x, {});
    const Tensor dw = normal_tensor(DType::kFloat32, {s.n, s.k}, 5);
    const Tensor before = copy_of(dw);
    quantized_weight_gradient(linear, dy, x, dw, true, arena, {});
    expect_product(dy_col, x_col, before, dw, what + " dw added");
    quantized_weight_gradient(linear, dy, x, dw, false, arena, {});
    expect_product(dy_col, x_col, {}, dw, what + " dw");
    EXPECT_EQ(arena.in_use(), 0);
  }
}

// The options that change operands do: a recipe that ignored one would give the bits of another.
TEST(QuantizedLinear, EveryOptionChangesTheResult) {
  const Tensor w = normal_tensor(DType::kBFloat16, {48, 80}, 1);
  // Rows so different that a scale of 32 of them leaves some below the format's normal numbers.
  for (int64_t i = 0; i < 48 * 80; ++i) put(w, i, get(w, i) * std::exp2(double(i / 80 % 32)));
  const Tensor x = activations(64, 80, 2), dy = activations(64, 48, 3);
  const int64_t begin[] = {0, 64};
  const Groups groups{.begin_E1 = TensorView(const_cast<int64_t*>(begin), DType::kInt64, {2}),
                      .experts = 1,
                      .capacity = 64};
  Arena arena("test");
  std::vector<std::pair<std::string, std::string>> seen;
  for (const bool grouped : {false, true}) {
    seen.clear();
    for (const RecipeCase& c : recipe_cases()) {
      const QuantizedLinear linear{&c.recipe, {{}, w}, {&rng, kTensor, grouped ? 1 : 0}};
      const Tensor y(DType::kFloat32, {64, 48}), dx(DType::kFloat32, {64, 80}),
          dw(DType::kFloat32, {48, 80});
      if (grouped) {
        quantized_grouped_forward(linear, groups, {x}, y, {}, {}, arena, {});
        quantized_grouped_input_gradient(linear, groups, {dy}, dx, arena, {});
        quantized_grouped_weight_gradient(linear, groups, {dy}, {x}, dw.view().reshape({1, 48, 80}),
                                          {}, arena, {});
      } else {
        quantized_forward(linear, x, y, {}, arena, {});
        quantized_input_gradient(linear, dy, dx, {}, arena, {});
        quantized_weight_gradient(linear, dy, x, dw, false, arena, {});
      }
      std::string all;
      for (const Tensor* t : {&y, &dx, &dw}) {
        all.append(static_cast<const char*>(t->view().raw()), t->view().bytes());
      }
      for (const auto& [other, bytes] : seen) EXPECT_TRUE(all != bytes) << c.name << ", " << other;
      seen.emplace_back(c.name, all);
    }
  }
}

TEST_P(QuantizedLinears, WeightsKeptInTheFormatGiveTheSameBits) {
  const Tensor w = normal_tensor(DType::kBFloat16, {3, 40, 48}, 1);
  std::vector<QuantizedTensor> owned;
  std::vector<QuantizedView> members;
  for (int64_t e = 0; e < 3; ++e) {
    owned.emplace_back(recipe().weight, 40, 48,
                       Directions{true, !has_one_coding(recipe().weight.format)});
    quant::quantize(w.view().select(e), owned.back(), {}, {});
    members.push_back(owned.back());
  }
  const auto operands = [&](const LinearWeight& weight, Direction direction) {
    const Operand o = make_weight_operand(recipe().weight, direction, weight, arena, {});
    return std::pair{copy_of(o.data),
                     o.scale.tensor.defined() ? copy_of(o.scale.tensor) : Tensor()};
  };
  for (const Direction direction : {Direction::kRow, Direction::kCol}) {
    const auto [data, scale] = operands({members, {}}, direction);
    const auto [expected, expected_scale] = operands({{}, w}, direction);
    EXPECT_TRUE(same_bits(data, expected));
    EXPECT_TRUE(same_bits(scale, expected_scale));
  }
}

// A product takes exactly the bytes of the arena that quantized_linear_bytes says.
TEST_P(QuantizedLinears, WorkspaceIsAsStated) {
  constexpr int64_t kExperts = 3, kN = 48, kK = 80, kRows = 150;
  const Tensor w = normal_tensor(DType::kBFloat16, {kExperts, kN, kK}, 1);
  const Tensor x = activations(kRows, kK, 2), dy = activations(kRows, kN, 3);
  const Tensor y(DType::kBFloat16, {kRows, kN}), dx(DType::kBFloat16, {kRows, kK}),
      dw(DType::kFloat32, {kExperts, kN, kK}), begin(DType::kInt64, {kExperts + 1});
  for (int64_t e = 0; e <= kExperts; ++e) begin.data<int64_t>()[e] = e * 50;
  const Groups groups{.begin_E1 = begin, .experts = kExperts, .capacity = kRows};
  const auto peak = [](const std::function<void(Arena&)>& product) {
    Arena arena("test");
    product(arena);
    return arena.peak();
  };
  const RandomBits bits{&rng, kTensor};
  const QuantizedLinear dense{&recipe(), {{}, w.view().select(0)}, bits};
  const LinearBytes d = quantized_linear_bytes(recipe(), {0, kN, kK, kRows, false});
  EXPECT_EQ(peak([&](Arena& a) { quantized_forward(dense, x, y, {}, a, {}); }), d.forward);
  EXPECT_EQ(peak([&](Arena& a) { quantized_input_gradient(dense, dy, dx, {}, a, {}); }),
            d.input_gradient);
  EXPECT_EQ(peak([&](Arena& a) {
              quantized_weight_gradient(dense, dy, x, dw.view().select(0), false, a, {});
            }),
            d.weight_gradient);
  const QuantizedLinear experts{&recipe(), {{}, w}, bits};
  const LinearBytes g = quantized_linear_bytes(recipe(), {kExperts, kN, kK, kRows, false});
  EXPECT_EQ(
      peak([&](Arena& a) { quantized_grouped_forward(experts, groups, {x}, y, {}, {}, a, {}); }),
      g.forward);
  EXPECT_EQ(
      peak([&](Arena& a) { quantized_grouped_input_gradient(experts, groups, {dy}, dx, a, {}); }),
      g.input_gradient);
  EXPECT_EQ(peak([&](Arena& a) {
              quantized_grouped_weight_gradient(experts, groups, {dy}, {x}, dw.view(), {}, a, {});
            }),
            g.weight_gradient);
  // Rows that are read through a map.
  const int64_t sources = 21;
  const Tensor map(DType::kInt32, {kRows}), x_T = activations(sources, kK, 5),
                                            dy_T = activations(sources, kN, 6);
  for (int64_t r = 0; r < kRows; ++r) map.data<int32_t>()[r] = static_cast<int32_t>(r % sources);
  const LinearBytes m = quantized_linear_bytes(recipe(), {.experts = kExperts,
                                                          .n = kN,
                                                          .k = kK,
                                                          .rows = kRows,
                                                          .in_format = false,
                                                          .x_sources = sources,
                                                          .dy_sources = sources});
  EXPECT_EQ(peak([&](Arena& a) {
              quantized_grouped_forward(experts, groups, {x_T, map}, y, {}, {}, a, {});
            }),
            m.forward);
  EXPECT_EQ(peak([&](Arena& a) {
              quantized_grouped_input_gradient(experts, groups, {dy_T, map}, dx, a, {});
            }),
            m.input_gradient);
  EXPECT_EQ(peak([&](Arena& a) {
              quantized_grouped_weight_gradient(experts, groups, {dy_T, map}, {x_T, map}, dw.view(),
                                                {}, a, {});
            }),
            m.weight_gradient);
}

// Groups with gaps, dead rows that hold NaN, empty groups: each group is a dense layer of its own.
TEST_P(QuantizedLinears, GroupsAreDenseLayersOfTheirRows) {
  constexpr int64_t kN = 48, kK = 80, kCapacity = 210;
  constexpr int64_t kCounts[] = {3, 0, 130, 17}, kBegins[] = {2, 5, 5, 140, 160};
  const Tensor w = normal_tensor(DType::kBFloat16, {4, kN, kK}, 1);
  const Tensor x = activations(kCapacity, kK, 2), dy = activations(kCapacity, kN, 3);
  std::vector<bool> live(kCapacity);
  for (int e = 0; e < 4; ++e) {
    for (int64_t r = 0; r < kCounts[e]; ++r) live[kBegins[e] + r] = true;
  }
  for (int64_t r = 0; r < kCapacity; ++r) {
    if (live[r]) continue;
    fill(x.view().select(r), std::nan(""));
    fill(dy.view().select(r), std::nan(""));
  }
  Tensor counts(DType::kInt64, {4}), begins(DType::kInt64, {5});
  std::copy_n(kCounts, 4, counts.data<int64_t>());
  std::copy_n(kBegins, 5, begins.data<int64_t>());
  const Groups groups{.count_E = counts, .begin_E1 = begins, .experts = 4, .capacity = kCapacity};
  const QuantizedLinear linear{&recipe(), {{}, w}, {&rng, kTensor, 9}};

  Tensor y(DType::kBFloat16, {kCapacity, kN}), dx(DType::kBFloat16, {kCapacity, kK}),
      dw(DType::kFloat32, {4, kN, kK});
  for (const Tensor* t : {&y, &dx}) fill(*t, kSentinel);
  fill(dw, 0.5);
  quantized_grouped_forward(linear, groups, {x}, y, {}, {}, arena, {});
  quantized_grouped_input_gradient(linear, groups, {dy}, dx, arena, {});
  const float beta[] = {1, 1, 0, 1};
  quantized_grouped_weight_gradient(
      linear, groups, {dy}, {x}, dw.view(),
      {.per_group = TensorView(const_cast<float*>(beta), DType::kFloat32, {4})}, arena, {});
  EXPECT_EQ(arena.in_use(), 0);

  for (int64_t r = 0; r < kCapacity; ++r) {
    if (live[r]) continue;
    for (int64_t c = 0; c < kN; ++c) ASSERT_EQ(get(y, r, c), kSentinel);
    for (int64_t c = 0; c < kK; ++c) ASSERT_EQ(get(dx, r, c), kSentinel);
  }
  const Tensor half(DType::kFloat32, {kN, kK});
  fill(half, 0.5);
  for (int64_t e = 0; e < 4; ++e) {
    const int64_t begin = kBegins[e], end = begin + kCounts[e];
    const std::string what = text("group {}", e);
    const TensorView xe = x.view().slice(0, begin, end), dye = dy.view().slice(0, begin, end);
    const RandomBits bits{&rng, kTensor, static_cast<int32_t>(9 + e)};
    expect_product(dequantized(recipe().input, Direction::kRow, xe, {}),
                   dequantized(recipe().weight, Direction::kRow, w.view().select(e), {}), {},
                   y.view().slice(0, begin, end), what);
    expect_product(dequantized(recipe().gradient, Direction::kRow, dye, bits),
                   dequantized(recipe().weight, Direction::kCol, w.view().select(e), {}), {},
                   dx.view().slice(0, begin, end), what + " dx");
    expect_product(dequantized(recipe().gradient, Direction::kCol, dye, bits),
                   dequantized(recipe().input, Direction::kCol, xe, {}),
                   beta[e] == 1 ? half.view() : TensorView(), dw.view().select(e), what + " dw");
  }
}

// Everything that a quantized MLP stores.
struct MlpRun {
  static constexpr int64_t kExperts = 3, kD = 48, kF = 32, kCapacity = 64, kTokens = 27;
  Tensor x_T = activations(kTokens, kD, 1), d_o_T = activations(kTokens, kD, 2),
         x{DType::kBFloat16, {kCapacity, kD}}, d_o{DType::kBFloat16, {kCapacity, kD}},
         source{DType::kInt32, {kCapacity}}, prob = normal_tensor(DType::kFloat32, {kCapacity}, 3),
         w1 = normal_tensor(DType::kBFloat16, {kExperts, 2 * kF, kD}, 4),
         w2 = normal_tensor(DType::kBFloat16, {kExperts, kD, kF}, 5),
         b1 = normal_tensor(DType::kBFloat16, {kExperts, 2 * kF}, 6),
         b2 = normal_tensor(DType::kBFloat16, {kExperts, kD}, 7);
  Tensor begin{DType::kInt64, {kExperts + 1}};
  Tensor h{DType::kBFloat16, {kCapacity, 2 * kF}}, o{DType::kBFloat16, {kCapacity, kD}},
      dh{DType::kBFloat16, {kCapacity, 2 * kF}}, a{DType::kBFloat16, {kCapacity, kF}},
      dx{DType::kBFloat16, {kCapacity, kD}}, dprob{DType::kFloat32, {kCapacity}},
      dw1{DType::kFloat32, {kExperts, 2 * kF, kD}}, dw2{DType::kFloat32, {kExperts, kD, kF}},
      db1{DType::kFloat32, {kExperts, 2 * kF}}, db2{DType::kFloat32, {kExperts, kD}};

  Tensor row{DType::kInt32, {kTokens, 3}}, o_T{DType::kBFloat16, {kTokens, kD}},
      dx_T{DType::kBFloat16, {kTokens, kD}};

  // Rows in the order of experts, where they lie, or also summed for each token.
  enum class Maps { kNone, kSource, kBoth };
  MlpInput input(Maps maps = Maps::kNone) const {
    return {.groups = {.begin_E1 = begin, .experts = kExperts, .capacity = kCapacity},
            .x = maps == Maps::kNone ? x : x_T,
            .prob_R = prob,
            .source_R = maps == Maps::kNone ? TensorView() : source.view(),
            .row_TK = maps == Maps::kBoth ? row.view() : TensorView()};
  }
  MlpGradients gradients(Maps maps = Maps::kNone) const {
    return {.d_o = maps == Maps::kNone ? d_o : d_o_T,
            .h = h,
            .dh = dh,
            .a = a,
            .dx = maps == Maps::kBoth ? dx_T : dx,
            .dprob_R = dprob,
            .db1_EH = db1,
            .db2_ED = db2};
  }
  explicit MlpRun(const Recipe& recipe, bool bias, Maps maps = Maps::kNone) {
    const int64_t rows[] = {0, 20, 20, kCapacity};
    std::copy_n(rows, 4, begin.data<int64_t>());
    std::fill_n(row.data<int32_t>(), kTokens * 3, -1);
    for (int64_t r = 0; r < kCapacity; ++r) {
      const int64_t t = r == 5 ? -1 : (7 * r + r / 9) % kTokens;  // row 5 is a row of zeros
      source.data<int32_t>()[r] = static_cast<int32_t>(t);
      for (int64_t k = 0; t >= 0 && k < 3; ++k) {
        int32_t& place = row.data<int32_t>()[t * 3 + k];
        if (place >= 0) continue;
        place = static_cast<int32_t>(r);
        break;
      }
      for (const auto& [to, from] : {std::pair{&x, &x_T}, std::pair{&d_o, &d_o_T}}) {
        for (int64_t c = 0; c < kD; ++c) {
          to->data<bf16>()[r * kD + c] = t < 0 ? bf16(0.0f) : from->data<bf16>()[t * kD + c];
        }
      }
    }
    Arena arena("test");
    const QuantizedMlp mlp{swiglu(),
                           0,
                           {&recipe, {{}, w1}, {&rng, 11, 1}},
                           {&recipe, {{}, w2}, {&rng, 12, 1}},
                           bias ? b1.view() : TensorView(),
                           bias ? b2.view() : TensorView()};
    MlpGradients g = gradients(maps);
    if (!bias) g.db1_EH = g.db2_ED = TensorView();
    quantized_mlp_forward(mlp, input(maps), h, maps == Maps::kBoth ? o_T : o, arena, {});
    quantized_mlp_backward_data(mlp, input(maps), g, arena, {});
    quantized_mlp_backward_weights(mlp, input(maps), g, {dw2.view(), {}}, {dw1.view(), {}}, arena,
                                   {});
    EXPECT_EQ(arena.in_use(), 0);
  }
};

// The MLP is its linears and the activation, one after the other.
TEST_P(QuantizedLinears, MlpIsMadeOfItsSteps) {
  for (const bool bias : {false, true}) {
    const MlpRun run(recipe(), bias);
    const Groups groups = run.input().groups;
    const QuantizedLinear fc1{&recipe(), {{}, run.w1}, {&rng, 11, 1}};
    const QuantizedLinear fc2{&recipe(), {{}, run.w2}, {&rng, 12, 1}};
    const ActivationArgs activation{
        .activation = swiglu(), .groups = groups, .h = run.h, .prob_R = run.prob};
    const Tensor h = copy_of(run.h), a = copy_of(run.a), da = copy_of(run.a), o = copy_of(run.o),
                 dh = copy_of(run.dh), dx = copy_of(run.dx), dprob = copy_of(run.dprob),
                 dw1 = copy_of(run.dw1), dw2 = copy_of(run.dw2);
    for (const Tensor* t : {&h, &a, &o, &dh, &dx, &dw1, &dw2}) fill(*t, kSentinel);
    const TensorView none;
    quantized_grouped_forward(fc1, groups, {run.x}, h, bias ? run.b1.view() : none, {}, arena, {});
    activation_forward(activation, a, {});
    quantized_grouped_forward(fc2, groups, {a}, o, bias ? run.b2.view() : none,
                              bias ? run.prob.view() : none, arena, {});
    quantized_grouped_input_gradient(fc2, groups, {run.d_o}, da, arena, {});
    activation_backward(activation, da, dh, {}, dprob, {});
    quantized_grouped_input_gradient(fc1, groups, {dh}, dx, arena, {});
    quantized_grouped_weight_gradient(fc2, groups, {run.d_o}, {a}, dw2.view(), {}, arena, {});
    quantized_grouped_weight_gradient(fc1, groups, {dh}, {run.x}, dw1.view(), {}, arena, {});
    EXPECT_TRUE(same_bits(h, run.h));
    EXPECT_TRUE(same_bits(a, run.a));
    EXPECT_TRUE(same_bits(o, run.o));
    EXPECT_TRUE(same_bits(dh, run.dh));
    EXPECT_TRUE(same_bits(dx, run.dx));
    EXPECT_TRUE(same_bits(dw1, run.dw1));
    EXPECT_TRUE(same_bits(dw2, run.dw2));
    EXPECT_TRUE(bias || same_bits(dprob, run.dprob));
  }
}

TEST_P(QuantizedLinears, RowsReadThroughAMapGiveTheBitsOfCopies) {
  for (const bool bias : {false, true}) {
    const MlpRun copies(recipe(), bias);
    for (const MlpRun::Maps maps : {MlpRun::Maps::kSource, MlpRun::Maps::kBoth}) {
      const MlpRun map(recipe(), bias, maps);
      EXPECT_TRUE(same_bits(map.h, copies.h));
      EXPECT_TRUE(same_bits(map.dh, copies.dh));
      EXPECT_TRUE(same_bits(map.a, copies.a));
      EXPECT_TRUE(same_bits(map.dprob, copies.dprob));
      EXPECT_TRUE(same_bits(map.dw1, copies.dw1));
      EXPECT_TRUE(same_bits(map.dw2, copies.dw2));
      EXPECT_TRUE(!bias || (same_bits(map.db1, copies.db1) && same_bits(map.db2, copies.db2)));
      if (maps == MlpRun::Maps::kSource) {
        EXPECT_TRUE(same_bits(map.o, copies.o));
        EXPECT_TRUE(same_bits(map.dx, copies.dx));
        continue;
      }
      const Tensor o_T(DType::kBFloat16, {MlpRun::kTokens, MlpRun::kD}),
          dx_T(DType::kBFloat16, {MlpRun::kTokens, MlpRun::kD});
      sum_rows(copies.o, copies.row, o_T, {}, {});
      sum_rows(copies.dx, copies.row, dx_T, {}, {});
      EXPECT_TRUE(same_bits(map.o_T, o_T));
      EXPECT_TRUE(same_bits(map.dx_T, dx_T));
    }
  }
}

TEST_P(QuantizedLinears, BitsDoNotDependOnThreads) {
  std::vector<std::unique_ptr<MlpRun>> runs;
  for (const int threads : {1, 3}) {
    const ThreadBudget budget(threads);
    runs.push_back(std::make_unique<MlpRun>(recipe(), true));
  }
  EXPECT_TRUE(same_bits(runs[0]->o, runs[1]->o));
  EXPECT_TRUE(same_bits(runs[0]->dx, runs[1]->dx));
  EXPECT_TRUE(same_bits(runs[0]->dw1, runs[1]->dw1));
  EXPECT_TRUE(same_bits(runs[0]->dw2, runs[1]->dw2));
  EXPECT_TRUE(same_bits(runs[0]->dprob, runs[1]->dprob));
  const Tensor w = normal_tensor(DType::kBFloat16, {300, 272}, 1), x = activations(400, 272, 2);
  std::vector<Tensor> y;
  for (const int threads : {1, 3}) {
    const ThreadBudget budget(threads);
    y.emplace_back(DType::kFloat32, std::initializer_list<int64_t>{400, 300});
    quantized_forward({&recipe(), {{}, w}, {}}, x, y.back(), {}, arena, {});
  }
  EXPECT_TRUE(same_bits(y[0], y[1]));
}

TEST(QuantizedLinear, RefusesWhatItCannotDo) {
  const Recipe recipe = recipe_of(Format::kMxfp8, Format::kMxfp8);
  const Tensor w = normal_tensor(DType::kBFloat16, {32, 64}, 1), x = activations(4, 48, 2),
               y(DType::kBFloat16, {4, 32}), row(DType::kInt32, {4, 1}), begin(DType::kInt64, {2});
  Arena arena("test");
  EXPECT_THROW(quantized_forward({&recipe, {{}, w}, {}}, x, y, {}, arena, {}), Error);
  EXPECT_THROW(quantized_forward({nullptr, {{}, w}, {}}, x, y, {}, arena, {}), Error);
  const Tensor fp32 = normal_tensor(DType::kFloat32, {4, 64}, 2);
  EXPECT_THROW(quantized_forward({&recipe, {{}, w}, {}}, fp32, y, {}, arena, {}), Error);
  const QuantizedMlp mlp{swiglu(), 0, {&recipe, {{}, w}, {}}, {&recipe, {{}, w}, {}}, {}, {}};
  const MlpInput input{
      .groups = {.begin_E1 = begin, .experts = 1, .capacity = 4}, .x = x, .row_TK = row};
  EXPECT_NE(error_of([&] {
              quantized_mlp_forward(mlp, input, y, y, arena, {});
            }).find("its inverse source_R is missing"),
            std::string::npos);
  // The limit reaches the product.
  const Groups groups{.begin_E1 = begin, .experts = 1, .capacity = 4};
  const Tensor wide = activations(4, 64, 3), dw(DType::kFloat32, {1, 32, 64});
  QuantizedLinear limited{&recipe, {{}, w.view().reshape({1, 32, 64})}, {}};
  limited.sm_limit = -1;
  EXPECT_EQ(error_of([&] {
              quantized_grouped_weight_gradient(limited, groups, {y}, {wide}, dw.view(), {}, arena,
                                                {});
            }),
            "grouped_gemm: sm_limit is -1, expected a number of multiprocessors, or 0");
}

}  // namespace
}  // namespace moiety::gemm
