// Quantized operands, linears and experts on a GPU: operands have the bytes of the CPU's, each
// product is near the CPU's of the same inputs, and one captured graph serves all routings.
#include "moiety/base/graph.h"
#include "tests/gemm/quantized_cases.h"
#include "tests/gemm_gpu/bounds.h"

namespace moiety::gemm {
namespace {

constexpr uint32_t kTensor = 7;
constexpr double kNearBf16 = 0x1p-7, kNearFp32 = 0x1p-13;

std::string differing(const char* what, const TensorView& got, const TensorView& expected) {
  const std::string where = difference(got, expected);
  return where.empty() ? where : text("{}: {}; ", what, where);
}

class QuantizedGpu : public GpuTest, public testing::WithParamInterface<RecipeCase> {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    rng_ = Twin(DType::kUInt8, {sizeof(quant::RngState)}, stream);
    set_draw(3);
  }
  void set_draw(uint64_t draw) const {
    const quant::RngState state{0x0123456789ABCDEF, draw};
    std::memcpy(rng_.host.view().raw(), &state, sizeof state);
    rng_.upload(stream);
  }
  const Recipe& recipe() const { return GetParam().recipe; }
  RandomBits bits(Side side, int32_t expert = 0) const {
    return {static_cast<const quant::RngState*>(side(rng_).raw()), kTensor, expert};
  }
  Stream on(Side side) const { return side.gpu ? stream : Stream(); }

  // Empty if make(side, arena) gives the same bytes on both, memory that it does not write, which
  // is zero, included.
  template <class Make>
  std::string operand_difference(Make&& make) const {
    Arena here("test"), there("test", stream.device());
    const Operand expected = make(kHost, here), got = make(kOnGpu, there);
    if (expected.transposed != got.transposed) return "transposed";
    return bytes("data", got.data, expected.data) +
           bytes("tensor scale", got.scale.tensor, expected.scale.tensor) +
           bytes("block scales", got.scale.block, expected.scale.block);
  }

 private:
  std::string bytes(const char* what, const TensorView& got, const TensorView& expected) const {
    if (got.defined() != expected.defined()) return text("{} is missing; ", what);
    if (got.numel() == 0) return {};
    // The operands as they lie in memory, which may be transposed.
    const TensorView there(got.raw(), got.dtype(), {got.numel()}, got.device()),
        here(expected.raw(), expected.dtype(), {expected.numel()});
    return differing(what, to_host(there, stream), here);
  }

  Twin rng_;
};
INSTANTIATE_TEST_SUITE_P(Recipes, QuantizedGpu, testing::ValuesIn(recipe_cases()),
                         [](const auto& c) { return c.param.name; });

constexpr Direction kDirections[] = {Direction::kRow, Direction::kCol};

TEST_P(QuantizedGpu, OperandsHaveTheBytesOfTheCpu) {
  for (const int64_t rows : {0, 1, 33, 150, 256}) {
    const Twin x(activations(rows, 144, 1), stream);
    for (const Direction direction : kDirections) {
      for (const QuantSpec& spec : {recipe().input, recipe().gradient}) {
        EXPECT_EQ(operand_difference([&](Side side, Arena& arena) {
                    return make_operand(spec, direction, side(x), {bits(side)}, arena, on(side));
                  }),
                  "")
            << rows;
      }
    }
  }
}

TEST_P(QuantizedGpu, OperandsOfGroupsHaveTheBytesOfTheCpu) {
  for (const GroupCase& c : group_cases()) {
    if (c.counts.size() > 300) continue;
    SCOPED_TRACE(c.name);
    const TestGroups groups(c);
    const Twin count(groups().count_E, stream), begin(groups().begin_E1, stream);
    const Tensor values = activations(groups.capacity(), 80, 2);
    groups.fill_dead_rows(values, NAN);
    const Twin x(values, stream);
    const auto there = [&](Side side) {
      Groups g = groups();
      g.count_E = side(count);
      g.begin_E1 = side(begin);
      g.status = TensorView();
      return g;
    };
    for (const Direction direction : kDirections) {
      EXPECT_EQ(operand_difference([&](Side side, Arena& arena) {
                  return make_grouped_operand(recipe().gradient, direction, {side(x)}, there(side),
                                              {bits(side, 5)}, arena, on(side));
                }),
                "");
    }
    // The places of groups in the col direction.
    for (const bool begins : {false, true}) {
      EXPECT_EQ(operand_difference([&](Side side, Arena& arena) {
                  const Groups g =
                      grouped_operand_groups(recipe().gradient, there(side), arena, on(side));
                  Operand out;
                  out.data = begins ? g.begin_E1 : g.count_E;
                  return out;
                }),
                "");
    }
  }
}

TEST_P(QuantizedGpu, OperandsOfWeightsHaveTheBytesOfTheCpu) {
  constexpr int64_t kExperts = 3, kN = 144, kK = 80;
  const QuantSpec& spec = recipe().weight;
  const Twin w(normal_tensor(DType::kBFloat16, {kExperts, kN, kK}, 1), stream);
  std::vector<QuantizedTensor> owned;
  std::vector<QuantizedView> members[2];
  for (const Side side : {kHost, kOnGpu}) {
    for (int64_t e = 0; e < kExperts; ++e) {
      owned.emplace_back(spec, kN, kK, Directions{true, !has_one_coding(spec.format)},
                         on(side).device());
      quant::quantize(side(w).select(e), owned.back(), {}, on(side));
      members[side.gpu].push_back(owned.back());
    }
  }
  for (const Direction direction : kDirections) {
    for (const bool in_format : {false, true}) {
      EXPECT_EQ(operand_difference([&](Side side, Arena& arena) {
                  LinearWeight weight;
                  if (in_format) {
                    weight.quantized = members[side.gpu];
                  } else {
                    weight.values = side(w);
                  }
                  return make_weight_operand(spec, direction, weight, arena, on(side));
                }),
                "")
          << in_format;
    }
  }
}

TEST_P(QuantizedGpu, LinearsAreNearTheCpu) {
  struct Shape {
    int64_t tokens, n, k;
  };
  for (const Shape& s : {Shape{1, 16, 16}, {33, 48, 80}, {150, 144, 272}, {128, 256, 128}}) {
    SCOPED_TRACE(text("T={} N={} K={}", s.tokens, s.n, s.k));
    const Twin w(normal_tensor(DType::kBFloat16, {s.n, s.k}, 1), stream),
        x(activations(s.tokens, s.k, 2), stream), dy(activations(s.tokens, s.n, 3), stream),
        residual(normal_tensor(DType::kBFloat16, {s.tokens, s.n}, 4), stream),
        y(DType::kBFloat16, {s.tokens, s.n}, stream), dx(DType::kFloat32, {s.tokens, s.k}, stream),
        dw(normal_tensor(DType::kFloat32, {s.n, s.k}, 5), stream);
    for (const Side side : {kHost, kOnGpu}) {
      Arena arena("test", on(side).device());
      const QuantizedLinear linear{&recipe(), {{}, side(w)}, bits(side)};
      quantized_forward(linear, side(x), side(y), side(residual), arena, on(side));
      quantized_input_gradient(linear, side(dy), side(dx), {}, arena, on(side));
      quantized_weight_gradient(linear, side(dy), side(x), side(dw), true, arena, on(side));
      stream.synchronize();  // the arena's memory goes
    }
    EXPECT_EQ(far_rows("y", y.download(stream), y.host, kNearBf16), "");
    EXPECT_EQ(far_rows("dx", dx.download(stream), dx.host, kNearFp32), "");
    EXPECT_EQ(far_rows("dw", dw.download(stream), dw.host, kNearFp32), "");
  }
}

// Everything that quantized experts read and write.
struct Experts {
  static constexpr int64_t kD = 80, kF = 48;
  static constexpr Activation kActivation{ActivationKind::kGlu, 1.702f, swiglu().limit, 1};

  Experts(const GroupCase& c, const Stream& stream_in)
      : stream(stream_in),
        groups(c),
        rows(groups.capacity()),
        experts(groups.experts()),
        count(groups().count_E, stream),
        begin(groups().begin_E1, stream),
        status(DType::kUInt32, {4}, stream),
        x(activations(rows, kD, 1), stream),
        d_o(activations(rows, kD, 2), stream),
        prob(normal_tensor(DType::kFloat32, {rows}, 3), stream),
        w1(normal_tensor(DType::kBFloat16, {experts, 2 * kF, kD}, 4), stream),
        w2(normal_tensor(DType::kBFloat16, {experts, kD, kF}, 5), stream),
        b1(normal_tensor(DType::kBFloat16, {experts, 2 * kF}, 6), stream),
        b2(normal_tensor(DType::kBFloat16, {experts, kD}, 7), stream),
        h(DType::kBFloat16, {rows, 2 * kF}, stream),
        o(DType::kBFloat16, {rows, kD}, stream),
        dh(DType::kBFloat16, {rows, 2 * kF}, stream),
        a(DType::kBFloat16, {rows, kF}, stream),
        da(DType::kBFloat16, {rows, kF}, stream),
        dx(DType::kBFloat16, {rows, kD}, stream),
        dprob(DType::kFloat32, {rows}, stream),
        dw1(DType::kFloat32, {experts, 2 * kF, kD}, stream),
        dw2(DType::kFloat32, {experts, kD, kF}, stream),
        db1(DType::kFloat32, {experts, 2 * kF}, stream),
        db2(DType::kFloat32, {experts, kD}, stream) {
    poison();
  }

  std::vector<std::pair<const char*, const Twin*>> results() const {
    return {{"h", &h},     {"o", &o},     {"dh", &dh},       {"a", &a},
            {"da", &da},   {"dx", &dx},   {"dprob", &dprob}, {"dw1", &dw1},
            {"dw2", &dw2}, {"db1", &db1}, {"db2", &db2}};
  }
  void poison() const {
    for (const auto& [what, t] : results()) {
      fill(t->host, kSentinel);
      t->upload(stream);
    }
  }
  Groups rows_on(Side side) const {
    Groups g = groups();
    g.count_E = side(count);
    g.begin_E1 = side(begin);
    g.status = side(status);
    return g;
  }
  ActivationArgs activation(Side side) const {
    ActivationArgs args;
    args.activation = kActivation;
    args.groups = rows_on(side);
    args.h = side(h);
    args.prob_R = side(prob);
    return args;
  }
  MlpInput input(Side side) const {
    return {.groups = rows_on(side), .x = side(x), .prob_R = side(prob)};
  }
  MlpGradients gradients(Side side) const {
    return {.d_o = side(d_o),
            .h = side(h),
            .dh = side(dh),
            .a = side(a),
            .dx = side(dx),
            .dprob_R = side(dprob),
            .db1_EH = side(db1),
            .db2_ED = side(db2)};
  }
  QuantizedMlp mlp(const Recipe& recipe, Side side, const RandomBits& bits) const {
    return {.activation = kActivation,
            .fc1 = {&recipe, {{}, side(w1)}, bits},
            .fc2 = {&recipe, {{}, side(w2)}, bits},
            .b1_EH = side(b1),
            .b2_ED = side(b2)};
  }
  void run(const QuantizedMlp& on_gpu, Arena& arena) const {
    quantized_mlp_forward(on_gpu, input(kOnGpu), h.gpu, o.gpu, arena, stream);
    quantized_mlp_backward_data(on_gpu, input(kOnGpu), gradients(kOnGpu), arena, stream);
    quantized_mlp_backward_weights(on_gpu, input(kOnGpu), gradients(kOnGpu), {dw2.gpu.view(), {}},
                                   {dw1.gpu.view(), {}}, arena, stream);
  }

  Stream stream;
  TestGroups groups;
  int64_t rows, experts;
  Twin count, begin, status, x, d_o, prob, w1, w2, b1, b2;
  Twin h, o, dh, a, da, dx, dprob, dw1, dw2, db1, db2;
};

// Each step is the CPU's on what the GPU's steps before it have stored: another code in an operand
// would change whole rows.
TEST_P(QuantizedGpu, ExpertsAreNearTheCpuStepByStep) {
  for (const GroupCase& c :
       {GroupCase{"gaps", {9, 0, 140, 1}, 7}, GroupCase{"one", {0, 1, 0}}, GroupCase{"e1", {33}},
        GroupCase{"empty", {0, 0}, 0, 3}, GroupCase{"all_to_one", {0, 260, 0}}}) {
    SCOPED_TRACE(c.name);
    const Experts p(c, stream);
    Arena there("test", kGpu), arena("test");
    p.run(p.mlp(recipe(), kOnGpu, bits(kOnGpu, 1)), there);
    stream.synchronize();
    const QuantizedMlp mlp = p.mlp(recipe(), kHost, bits(kHost, 1));
    const Groups groups = p.rows_on(kHost);
    const auto from_gpu = [&](const Twin& t) { copy_into(t.host, t.download(stream)); };

    quantized_grouped_forward(mlp.fc1, groups, {p.x.host}, p.h.host, p.b1.host, {}, arena, {});
    EXPECT_EQ(far_rows("h", p.h.download(stream), p.h.host, kNearBf16), "");
    from_gpu(p.h);
    activation_forward(p.activation(kHost), p.a.host, {});
    EXPECT_EQ(differing("a", p.a.download(stream), p.a.host), "");
    quantized_grouped_forward(mlp.fc2, groups, {p.a.host}, p.o.host, p.b2.host, p.prob.host, arena,
                              {});
    EXPECT_EQ(far_rows("o", p.o.download(stream), p.o.host, kNearBf16), "");

    quantized_grouped_input_gradient(mlp.fc2, groups, {p.d_o.host}, p.da.host, arena, {});
    activation_backward(p.activation(kHost), p.da.host, p.dh.host, {}, p.dprob.host, {});
    grouped_scale_grad({groups, {p.d_o.host}, p.b2.host, p.dprob.host, true}, {});
    EXPECT_EQ(far_rows("dh", p.dh.download(stream), p.dh.host, 2 * kNearBf16), "");
    const Tensor dprob = p.dprob.download(stream);
    for (const Tensor* t : {&dprob, &p.dprob.host}) p.groups.fill_dead_rows(*t, 0);
    EXPECT_EQ(far_rows("dprob", dprob.view().reshape({1, p.rows}),
                       p.dprob.host.view().reshape({1, p.rows}), kNearBf16),
              "");
    from_gpu(p.dh);
    quantized_grouped_input_gradient(mlp.fc1, groups, {p.dh.host}, p.dx.host, arena, {});
    EXPECT_EQ(far_rows("dx", p.dx.download(stream), p.dx.host, kNearBf16), "");

    quantized_mlp_backward_weights(mlp, p.input(kHost), p.gradients(kHost), {p.dw2.host.view(), {}},
                                   {p.dw1.host.view(), {}}, arena, {});
    EXPECT_EQ(far_rows("dw2", p.dw2.download(stream), p.dw2.host, kNearFp32), "");
    EXPECT_EQ(far_rows("dw1", p.dw1.download(stream), p.dw1.host, kNearFp32), "");
    grouped_bias_grad({groups, {p.d_o.host}, p.prob.host, p.db2.host}, {});
    grouped_bias_grad({groups, {p.dh.host}, {}, p.db1.host}, {});
    EXPECT_EQ(differing("db1", p.db1.download(stream), p.db1.host), "");
    EXPECT_EQ(differing("db2", p.db2.download(stream), p.db2.host), "");
    EXPECT_EQ(p.status.download(stream).data<uint32_t>()[0], 0u);
  }
}

// Other split sizes, values and random numbers: what a replay stores is what the calls store.
TEST_P(QuantizedGpu, OneCaptureServesEveryRouting) {
  const Experts p({"", {128, 0, 0, 90}}, stream);
  const QuantizedMlp mlp = p.mlp(recipe(), kOnGpu, bits(kOnGpu, 1));
  Arena arena("test", kGpu);
  p.run(mlp, arena);  // the arena has its memory
  stream.synchronize();
  const Graph graph(stream, [&] { p.run(mlp, arena); });
  const auto results = p.results();
  uint64_t draw = 10;
  for (const std::vector<int64_t>& split :
       std::vector<std::vector<int64_t>>{{0, 0, 0, 0}, {0, 218, 0, 0}, {1, 2, 3, 127}}) {
    for (int64_t e = 0, row = 0; e < 4; ++e) {
      p.begin.host.data<int64_t>()[e] = row;
      p.count.host.data<int64_t>()[e] = split[e];
      p.begin.host.data<int64_t>()[e + 1] = row += split[e];
    }
    p.begin.upload(stream);
    p.count.upload(stream);
    set_draw(++draw);
    std::vector<Tensor> replayed;
    p.poison();
    graph.launch(stream);
    for (const auto& [what, t] : results) replayed.push_back(t->download(stream));
    p.poison();
    p.run(mlp, arena);
    for (size_t i = 0; i < replayed.size(); ++i) {
      const auto& [what, t] = results[i];
      EXPECT_EQ(differing(what, replayed[i], t->download(stream)), "") << split[1];
    }
    stream.synchronize();
  }
}

}  // namespace
}  // namespace moiety::gemm
