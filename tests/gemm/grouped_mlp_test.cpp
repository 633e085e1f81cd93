// The grouped MLP: fused against reference against the steps one by one, gradients against finite
// differences in double, and the contracts on memory and maps.
#include "moiety/base/parallel.h"
#include "moiety/gemm/gemm_block.h"
#include "moiety/gemm/mlp_steps.h"
#include "tests/gemm/mlp_problem.h"
#include "tests/support/error_of.h"

namespace moiety::gemm {
namespace {

using Options = MlpOptions;
using Problem = MlpProblem;

// All results of two problems: equal bits where the products are, otherwise close.
void expect_equal(const Problem& p, const Problem& q) {
  const auto mine = p.results(), theirs = q.results();
  const bool exact = has_reference_bits(GemmEngine::kAuto, p.o.dtype);
  for (size_t i = 0; i < mine.size(); ++i) {
    const TensorView x = *mine[i].second, y = *theirs[i].second;
    if (exact) {
      EXPECT_TRUE(same_bits(x, y)) << mine[i].first;
      continue;
    }
    double scale = 0;
    for (int64_t j = 0; j < y.numel(); ++j) scale = std::max(scale, std::fabs(get(y, j)));
    for (int64_t j = 0; j < y.numel(); ++j) ASSERT_NEAR(get(x, j), get(y, j), 0x1p-6 * scale);
  }
}

class GroupedMlpCases : public testing::TestWithParam<GroupCase> {};

TEST_P(GroupedMlpCases, FusedEqualsReference) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (bool maps : {false, true}) {
      for (bool biases : {false, true}) {
        SCOPED_TRACE(text("{} maps {} biases {}", name(dtype), maps, biases));
        Options o{.dtype = dtype, .biases = biases, .maps = maps};
        if (biases) o.activation = {ActivationKind::kGlu, 1.702f, 2, 1};
        const Problem fused(GetParam(), o);
        o.path = MlpPath::kReference;
        const Problem reference(GetParam(), o);
        fused.run();
        reference.run();
        expect_equal(fused, reference);
        EXPECT_EQ(fused.groups.status()[0], 0u);
        const std::vector<int64_t> owner = fused.groups.owners();
        for (int64_t r = 0; r < fused.groups.capacity(); ++r) {
          ASSERT_EQ(get(fused.dprob, r) == kSentinel, owner[r] < 0);
          for (int64_t c = 0; c < fused.hidden; ++c) {
            ASSERT_EQ(get(fused.h, r, c) == kSentinel, owner[r] < 0);
            ASSERT_EQ(get(fused.dh, r, c) == kSentinel, owner[r] < 0);
          }
          for (int64_t c = 0; !maps && c < o.model; ++c) {
            ASSERT_EQ(get(fused.out, r, c) == kSentinel, owner[r] < 0);
            ASSERT_EQ(get(fused.dx, r, c) == kSentinel, owner[r] < 0);
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, GroupedMlpCases, testing::ValuesIn(mlp_cases()),
                         [](const auto& info) { return info.param.name; });

// The contract's rounding points: H, A, Y, dA, dH, dXr are the tensors that the single operations
// store.
TEST(GroupedMlp, IsTheCompositionOfItsSteps) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const Problem p({"", {5, 0, 41, 8}, 3}, {.dtype = dtype, .biases = true, .maps = true});
    p.run();
    const int64_t capacity = p.groups.capacity();
    const Tensor h(dtype, {capacity, p.hidden}), a(dtype, {capacity, p.o.ffn});
    const Tensor y(dtype, {capacity, p.o.model}), out(dtype, {p.tokens, p.o.model});
    GroupedGemmArgs f1;
    f1.groups = p.groups();
    f1.a = {p.x, p.source};
    f1.w = p.w1.view();
    f1.out = h;
    f1.bias_EN = p.b1;
    grouped_gemm(f1, Stream());
    const ActivationArgs f2{p.o.activation, 0, p.groups(), h, p.prob};
    activation_forward(f2, a, Stream());
    GroupedGemmArgs f3;
    f3.groups = p.groups();
    f3.a.data = a;
    f3.w = p.w2.view();
    f3.out = y;
    f3.bias_EN = p.b2;
    f3.bias_scale_R = p.prob;
    grouped_gemm(f3, Stream());
    sum_rows(y, p.row, out, {}, Stream());
    EXPECT_TRUE(same_bits(out, p.out));

    const Tensor da(dtype, {capacity, p.o.ffn}), dh(dtype, {capacity, p.hidden});
    const Tensor again(dtype, {capacity, p.o.ffn}), dxr(dtype, {capacity, p.o.model});
    const Tensor dprob(DType::kFloat32, {capacity}), dx(dtype, {p.tokens, p.o.model});
    GroupedGemmArgs b1;
    b1.op = GroupedOp::kDgrad;
    b1.groups = p.groups();
    b1.a = {p.d_o, p.source};
    b1.w = p.w2.view();
    b1.out = da;
    grouped_gemm(b1, Stream());
    activation_backward(f2, da, dh, again, dprob, Stream());
    grouped_scale_grad({p.groups(), {p.d_o, p.source}, p.b2, dprob, true}, Stream());
    b1.a = {dh, {}};
    b1.w = p.w1.view();
    b1.out = dxr;
    grouped_gemm(b1, Stream());
    sum_rows(dxr, p.row, dx, {}, Stream());
    EXPECT_TRUE(same_bits(dx, p.dx));
    const std::vector<int64_t> owner = p.groups.owners();
    for (int64_t r = 0; r < capacity; ++r) {
      if (owner[r] < 0) continue;
      ASSERT_EQ(get(dprob, r), get(p.dprob, r));
      for (int64_t f = 0; f < p.o.ffn; ++f) {
        ASSERT_EQ(get(p.a, r, f), get(a, r, f));
        ASSERT_EQ(get(p.a, r, f), get(again, r, f));
      }
    }
  }
}

TEST(GroupedMlp, GradientsMatchFiniteDifferences) {
  for (bool maps : {false, true}) {
    for (const Activation& activation : {swiglu(), clamped_swiglu(1.5f), squared_relu()}) {
      const Problem p({"", {3, 0, 4}}, {.dtype = DType::kFloat64,
                                        .path = MlpPath::kReference,
                                        .activation = activation,
                                        .biases = true,
                                        .maps = maps,
                                        .model = 4,
                                        .ffn = 3});
      p.run();
      const auto loss = [&] {
        p.forward();
        double sum = 0;
        for (int64_t i = 0; i < p.out.view().numel(); ++i) sum += get(p.out, i) * get(p.d_o, i);
        return sum;
      };
      const std::vector<std::tuple<const char*, const Tensor*, const Tensor*>> pairs = {
          {"x", &p.x, &p.dx},    {"prob", &p.prob, &p.dprob}, {"w1", &p.w1, &p.dw1},
          {"w2", &p.w2, &p.dw2}, {"b1", &p.b1, &p.db1},       {"b2", &p.b2, &p.db2}};
      const std::vector<int64_t> owner = p.groups.owners();
      for (const auto& [what, input, gradient] : pairs) {
        for (int64_t i = 0; i < input->view().numel(); ++i) {
          // With maps, a row that found no place at its token (-1) reads zeros and is in no sum.
          if (input == &p.prob && maps && p.source.data<int32_t>()[i] < 0) continue;
          constexpr double kStep = 1e-5;
          const double v = get(*input, i);
          put(*input, i, v + kStep);
          const double up = loss();
          put(*input, i, v - kStep);
          const double down = loss();
          put(*input, i, v);
          const double expected = (up - down) / (2 * kStep);
          ASSERT_NEAR(get(*gradient, i), expected, 1e-6 * (1 + std::fabs(expected))) << what << i;
        }
      }
    }
  }
}

TEST(GroupedMlp, Fp32IsCloseToDouble) {
  const GroupCase c{"", {9, 0, 30}};
  const Problem p(c, {.biases = true, .maps = true});
  const Problem exact(
      c, {.dtype = DType::kFloat64, .path = MlpPath::kReference, .biases = true, .maps = true});
  p.run();
  exact.run();
  const auto mine = p.results(), theirs = exact.results();
  for (size_t i = 0; i < mine.size(); ++i) {
    for (int64_t j = 0; j < mine[i].second->view().numel(); ++j) {
      const double v = get(*theirs[i].second, j);
      ASSERT_NEAR(get(*mine[i].second, j), v, 2e-3 * (1 + std::fabs(v))) << mine[i].first;
    }
  }
}

TEST(GroupedMlp, HiddenGradientMayTakeThePlaceOfHidden) {
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    Problem p({"", {9, 0, 30}}, {.dtype = dtype}), q({"", {9, 0, 30}}, {.dtype = dtype});
    p.run();
    q.gradients.dh = q.h;
    q.run();
    EXPECT_TRUE(same_bits(p.dh, q.h));
    for (auto [x, y] :
         {std::pair(&p.dx, &q.dx), {&p.dw1, &q.dw1}, {&p.dw2, &q.dw2}, {&p.a, &q.a}}) {
      EXPECT_TRUE(same_bits(*x, *y));
    }
  }
}

TEST(GroupedMlp, HiddenAloneHasTheSameBits) {
  const Problem p({"", {9, 0, 30}, 2}, {.dtype = DType::kBFloat16, .biases = true});
  p.forward();
  const Tensor h(DType::kBFloat16, p.h.view().sizes());
  fill(h, kSentinel);
  grouped_mlp_hidden(p.mlp, p.input, h, Stream());
  EXPECT_TRUE(same_bits(h, p.h));
}

TEST(GroupedMlp, IdentityMapEqualsNoMap) {
  const GroupCase c{"", {9, 0, 30}};
  Problem plain(c, {.dtype = DType::kBFloat16}), q(c, {.dtype = DType::kBFloat16});
  q.source = Tensor(DType::kInt32, {39});
  q.row = Tensor(DType::kInt32, {39, 1});
  for (int32_t r = 0; r < 39; ++r) q.source.data<int32_t>()[r] = q.row.data<int32_t>()[r] = r;
  q.input.source_R = q.source;
  q.input.row_TK = q.row;
  q.workspace = Tensor(DType::kUInt8, {grouped_mlp_workspace(q.mlp, q.input)});
  plain.run();
  q.run();
  expect_equal(plain, q);
}

// Without row_TK the caller sums rows; the input gradient may come apart from the rest.
TEST(GroupedMlp, RowsBeforeTheirSums) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const Problem p({"", {9, 0, 30}, 2}, {.dtype = dtype, .biases = true, .maps = true});
    p.run();
    MlpInput rows = p.input;
    rows.row_TK = {};
    const int64_t capacity = rows.groups.capacity;
    const Tensor y(dtype, {capacity, p.o.model}), dxr(dtype, {capacity, p.o.model}),
        h(dtype, p.h.view().sizes()), sum(dtype, p.out.view().sizes());
    EXPECT_LT(grouped_mlp_workspace(p.mlp, rows), grouped_mlp_workspace(p.mlp, p.input));
    fill(h, kSentinel);
    grouped_mlp_forward(p.mlp, rows, h, y, p.workspace, Stream());
    EXPECT_TRUE(same_bits(h, p.h));
    sum_rows(y, p.row, sum, {}, Stream());
    EXPECT_TRUE(same_bits(sum, p.out));
    for (const bool apart : {false, true}) {
      MlpGradients g = p.gradients;
      g.h = g.dh = h;
      g.dx = apart ? TensorView() : dxr.view();
      fill(dxr, kSentinel);
      grouped_mlp_forward(p.mlp, rows, h, y, p.workspace, Stream());
      grouped_mlp_backward_data(p.mlp, rows, g, p.workspace, Stream());
      g.dx = dxr;
      if (apart) grouped_mlp_backward_input(p.mlp, rows, g, Stream());
      sum_rows(dxr, p.row, sum, {}, Stream());
      EXPECT_TRUE(same_bits(sum, p.dx));
    }
    MlpInput alone = p.input;
    alone.source_R = {};
    EXPECT_THROW(grouped_mlp_forward(p.mlp, alone, h, y, p.workspace, Stream()), Error);
    EXPECT_THROW(grouped_mlp_backward_input(p.mlp, p.input, p.gradients, Stream()), Error);
  }
}

// The problem with and without an interleave; of the input's gradient its bits if `input_too`.
void expect_same_with_interleave(const MlpOptions& options, bool input_too) {
  const int64_t s = options.interleave, ffn = options.ffn, model = options.model;
  const GroupCase c{"", {9, 0, 300}};
  MlpOptions without = options;
  without.interleave = 0;
  const Problem plain(c, without), woven(c, options);
  const auto row = [&](int64_t i) { return i % ffn / s * 2 * s + i / ffn * s + i % s; };
  for (int64_t e = 0; e < 3; ++e) {
    for (int64_t i = 0; i < 2 * ffn; ++i) {
      for (int64_t d = 0; d < model; ++d) {
        put(woven.w1, (e * 2 * ffn + row(i)) * model + d,
            get(plain.w1, (e * 2 * ffn + i) * model + d));
      }
    }
  }
  plain.run();
  woven.run();
  EXPECT_TRUE(same_bits(plain.out, woven.out));
  EXPECT_TRUE(same_bits(plain.a, woven.a));
  EXPECT_TRUE(same_bits(plain.dprob, woven.dprob));
  EXPECT_TRUE(same_bits(plain.dw2, woven.dw2));
  if (input_too) {
    EXPECT_TRUE(same_bits(plain.dx, woven.dx));
    fill(woven.dx, kSentinel);
    grouped_mlp_backward_input(woven.mlp, woven.input, woven.gradients, Stream());
    EXPECT_TRUE(same_bits(plain.dx, woven.dx));
  }
  for (int64_t e = 0; e < 3; ++e) {
    for (int64_t i = 0; i < 2 * ffn; ++i) {
      for (int64_t d = 0; d < model; ++d) {
        ASSERT_EQ(get(woven.dw1, (e * 2 * ffn + row(i)) * model + d),
                  get(plain.dw1, (e * 2 * ffn + i) * model + d));
      }
    }
  }
}

TEST(GroupedMlp, InterleavedWeightsGiveTheSameOutputs) {
  expect_same_with_interleave({.dtype = DType::kBFloat16, .interleave = 8}, false);
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    for (const int64_t s : {32, 64}) {
      for (const MlpPath path : {MlpPath::kReference, MlpPath::kCpu}) {
        if (dtype == DType::kFloat64 && path == MlpPath::kCpu) continue;
        SCOPED_TRACE(text("{} s={} {}", name(dtype), s, name(path)));
        expect_same_with_interleave({.dtype = dtype, .path = path, .interleave = s, .ffn = 192},
                                    true);
      }
    }
  }
}

TEST(GroupedMlp, WeightGradientsAccumulateAndMayBeDelayed) {
  const GroupCase c{"", {9, 0, 300}};
  const Problem p(c, {.dtype = DType::kBFloat16});
  p.run();
  const Tensor once1 = copy_of(p.dw1), once2 = copy_of(p.dw2);
  std::memset(p.workspace.view().raw(), 0xFF, p.workspace.view().bytes());  // its time is over
  p.backward_weights(1);
  for (int64_t i = 0; i < once1.view().numel(); ++i) ASSERT_EQ(get(p.dw1, i), 2 * get(once1, i));
  for (int64_t i = 0; i < once2.view().numel(); ++i) ASSERT_EQ(get(p.dw2, i), 2 * get(once2, i));
  fill(p.dw1, kSentinel);
  grouped_mlp_backward_weights(p.mlp, p.input, p.gradients, {p.dw2.view(), {}}, {}, Stream());
  EXPECT_TRUE(same_bits(p.dw2, once2));
  EXPECT_EQ(get(p.dw1, 0), kSentinel) << "a frozen weight has no gradient";
}

TEST(GroupedMlp, BitsDoNotDependOnThreads) {
  const int threads = thread_budget();
  // Enough rows for tiles that are twice as high where one thread works.
  const GroupCase c{"", {90, 0, 2100, 3}};
  set_thread_budget(1);
  const Problem one(c, {.dtype = DType::kBFloat16, .ffn = 600});
  one.run();
  set_thread_budget(3);
  const Problem three(c, {.dtype = DType::kBFloat16, .ffn = 600});
  three.run();
  set_thread_budget(threads);
  const auto mine = one.results(), theirs = three.results();
  for (size_t i = 0; i < mine.size(); ++i) {
    EXPECT_TRUE(same_bits(*mine[i].second, *theirs[i].second)) << mine[i].first;
  }
}

TEST(GroupedMlp, WorkspaceAndSavedStateHaveTheBytesOfTheFormulas) {
  for (bool maps : {false, true}) {
    Problem p({"", {64, 64}}, {.dtype = DType::kBFloat16, .maps = maps, .model = 32, .ffn = 64});
    const int64_t capacity = 128, ffn = 2 * capacity * 64, model = maps ? 2 * capacity * 32 : 0;
    EXPECT_EQ(grouped_mlp_workspace(p.mlp, p.input), model);
    p.mlp.path = MlpPath::kReference;
    EXPECT_EQ(grouped_mlp_workspace(p.mlp, p.input), ffn + model);
    EXPECT_EQ(p.x.view().bytes() + p.h.view().bytes(), 2 * p.tokens * 32 + 4 * capacity * 64);
  }
}

TEST(GroupedMlp, DeferredStreamGivesTheSameBits) {
  const GroupCase c{"", {9, 0, 30}};
  const Problem now(c, {}), later(c, {});
  now.run();
  const Stream stream = Stream::deferred();
  grouped_mlp_forward(later.mlp, later.input, later.h, later.out, later.workspace, stream);
  grouped_mlp_backward_data(later.mlp, later.input, later.gradients, later.workspace, stream);
  grouped_mlp_backward_weights(later.mlp, later.input, later.gradients, {later.dw2.view(), {}},
                               {later.dw1.view(), {}}, stream);
  EXPECT_EQ(get(later.out, 0), kSentinel);
  stream.synchronize();
  expect_equal(now, later);
}

TEST(SumRows, HaveTheReferencesBits) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const int64_t columns : {0, 1, 127, 128, 300}) {
      constexpr int64_t kTokens = 37, kTopK = 3, kRows = 60;
      const Tensor rows = normal_tensor(dtype, {kRows, columns}, 1),
                   wide(dtype, {kTokens, columns + 5}), expected(dtype, {kTokens, columns}),
                   map(DType::kInt32, {kTokens, kTopK});
      for (int64_t i = 0; i < kTokens * kTopK; ++i) {
        map.data<int32_t>()[i] = static_cast<int32_t>(i * 7 % (kRows + 9)) - 4;  // some are dead
      }
      const TensorView out = wide.view().slice(1, 0, columns);
      sum_rows_cpu(rows, map, out);
      sum_rows_reference(rows, map, expected);
      EXPECT_TRUE(same_bits(converted(out, dtype), expected)) << name(dtype) << " " << columns;
    }
  }
}

TEST(SumRows, FromTheFirstLivingTermInOrder) {
  const Tensor rows = normal_tensor(DType::kFloat32, {4, 5}, 1), out(DType::kFloat32, {4, 5});
  const Tensor map(DType::kInt32, {4, 3}), status(DType::kUInt32, {4});
  const int32_t values[] = {2, 0, 3, -1, 1, -1, -1, -1, -1, 9, 1, 0};
  std::copy_n(values, 12, map.data<int32_t>());
  put(rows, 1 * 5 + 2, -0.0);
  sum_rows(rows, map, out, status, Stream());
  const auto at = [&](int64_t r, int64_t c) { return rows.data<float>()[r * 5 + c]; };
  for (int64_t c = 0; c < 5; ++c) {
    EXPECT_EQ(out.data<float>()[c], (at(2, c) + at(0, c)) + at(3, c));
    EXPECT_EQ(out.data<float>()[5 + c], at(1, c));
    EXPECT_EQ(out.data<float>()[10 + c], 0);
    EXPECT_EQ(out.data<float>()[15 + c], at(1, c) + at(0, c));
  }
  EXPECT_TRUE(std::signbit(out.data<float>()[5 + 2])) << "one term is not added to +0";
  EXPECT_EQ(status.data<uint32_t>()[0], kFaultIndex);
  EXPECT_EQ(status.data<uint32_t>()[3], 9u);
}

TEST(GroupedMlpPath, IsReportedWithReasons) {
  PathReport report = choose_grouped_mlp({DType::kFloat64, 8, 8}, Device{});
  EXPECT_EQ(report.path, MlpPath::kReference);
  ASSERT_EQ(report.rejected.size(), 1u);
  EXPECT_NE(report.rejected[0].reason.find("float64"), std::string::npos);
  EXPECT_EQ(report.describe(), "reference (cpu: dtype float64 is not float32 or bfloat16)");
  EXPECT_NO_THROW(report.require(MlpPath::kReference));
  try {
    report.require(MlpPath::kCpu);
    FAIL() << "nothing thrown";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kUnsupported);
    EXPECT_NE(std::string(e.what()).find("float64"), std::string::npos) << e.what();
  }
  if (engine_available(GemmEngine::kVector, DType::kFloat32)) {
    EXPECT_EQ(choose_grouped_mlp({DType::kBFloat16, 8, 8}, Device{}).path, MlpPath::kCpu);
  }
}

TEST(GroupedMlpPath, ThatIsRequiredMayBeALesserOne) {
  const GpuProperties hopper{.name = "H200", .major = 9};
  PathReport report = choose_grouped_mlp({DType::kBFloat16, 2048, 768}, hopper);
  report.require(MlpPath::kCudaPlain);
  EXPECT_EQ(report.describe(), "cuda_plain (sm90_fused: cuda_plain is required)");
  const auto error = [&](PathReport of, MlpPath path) {
    return error_of([&] { of.require(path); }, ErrorKind::kUnsupported);
  };
  EXPECT_EQ(error(choose_grouped_mlp({DType::kBFloat16, 12, 16}, hopper), MlpPath::kSm90),
            "grouped_mlp: path sm90 is required, cuda_plain was chosen; sm90_fused: D=12 is no "
            "multiple of 8; sm90: D=12 is no multiple of 8");
  EXPECT_EQ(
      error(report, MlpPath::kReference),
      "grouped_mlp: path reference is required, cuda_plain was chosen; sm90_fused: cuda_plain "
      "is required; reference is a path of CPUs");
}

TEST(GroupedMlpPath, ThatIsTakenByNameAlone) {
  const GpuProperties hopper{.name = "H200", .major = 9};
  const GroupedMlpDesc interleaved{
      .dtype = DType::kBFloat16, .model = 8, .ffn = 16, .interleave = 8};
  PathReport report = choose_grouped_mlp({DType::kBFloat16, 4096, 1000}, hopper);
  EXPECT_EQ(report.describe(), "sm90 (sm90_fused: with D=4096 and F=1000 it was slower)");
  report.require(MlpPath::kSm90Fused);
  EXPECT_EQ(report.describe(), "sm90_fused");
  EXPECT_EQ(error_of([&] { choose_grouped_mlp(interleaved, hopper).require(MlpPath::kSm90Fused); },
                     ErrorKind::kUnsupported),
            "grouped_mlp: path sm90_fused is required, sm90 was chosen; sm90_fused: interleave 8 "
            "is not 0");
}

TEST(GroupedMlpPath, MayDifferByPass) {
  const GpuProperties hopper{.name = "H200", .major = 9};
  const auto chosen = [&](int64_t model, int64_t ffn) {
    return choose_grouped_mlp({DType::kBFloat16, model, ffn}, hopper);
  };
  for (const auto& [model, ffn] :
       {std::pair{1536, 256}, {2048, 768}, {2880, 2880}, {4096, 14336}}) {
    EXPECT_EQ(chosen(model, ffn).describe(), "sm90_fused");
  }
  for (const auto& [model, ffn] : {std::pair{4096, 1024}, {4096, 2048}, {7168, 2048}}) {
    const PathReport report = chosen(model, ffn);
    EXPECT_EQ(report.path, MlpPath::kSm90Fused);
    EXPECT_TRUE(report.fused.forward && !report.fused.backward);
  }
  PathReport report = chosen(1024, 256);
  EXPECT_EQ(report.path, MlpPath::kSm90Fused);
  EXPECT_TRUE(!report.fused.forward && report.fused.backward);
  EXPECT_EQ(report.describe(),
            "sm90_fused backward, sm90 forward (sm90_fused: with D=1024 and F=256 forward was "
            "slower)");
  PathReport required = report;
  required.require(MlpPath::kSm90);
  EXPECT_EQ(required.describe(), "sm90 (sm90_fused: sm90 is required)");
  report.require(MlpPath::kSm90Fused);
  EXPECT_TRUE(report.fused.forward && report.fused.backward);
  EXPECT_EQ(report.describe(), "sm90_fused");
}

TEST(GroupedMlpPath, OfGpus) {
  const GpuProperties hopper{.name = "H200", .major = 9}, blackwell{.name = "B200", .major = 10};
  const auto plain = [](const GroupedMlpDesc& desc, const GpuProperties& gpu) {
    return choose_grouped_mlp(desc, gpu).describe();
  };
  EXPECT_EQ(
      plain({DType::kBFloat16, 8, 16}, blackwell),
      "cuda_plain (sm90_fused: capability 10.0 is not 9.0; sm90: capability 10.0 is not 9.0)");
  EXPECT_EQ(plain({DType::kFloat32, 8, 16}, hopper),
            "cuda_plain (sm90_fused: dtype float32 is not bfloat16; sm90: dtype float32 is not "
            "bfloat16)");
  EXPECT_EQ(plain({DType::kBFloat16, 12, 16}, hopper),
            "cuda_plain (sm90_fused: D=12 is no multiple of 8; sm90: D=12 is no multiple of 8)");
  EXPECT_EQ(plain({DType::kBFloat16, 8, 4}, hopper),
            "cuda_plain (sm90_fused: F=4 is no multiple of 8; sm90: F=4 is no multiple of 8)");
  EXPECT_THROW(choose_grouped_mlp({DType::kFloat64, 8, 8}, hopper), Error);
  const PathReport report = choose_grouped_mlp({DType::kBFloat16, 8, 8}, blackwell);
  const Problem p({"", {4, 5}}, {.path = report.path});
  try {
    p.forward();
    FAIL() << "nothing thrown";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "grouped_mlp: path cuda_plain on a stream of cpu");
  }
}

TEST(GroupedMlpErrors, NameTheArgument) {
  Problem p({"", {4, 5}}, {.maps = true});
  const TensorView short_workspace = p.workspace.view().slice(0, 0, p.workspace.view().numel() - 1);
  EXPECT_THROW(grouped_mlp_forward(p.mlp, p.input, p.h, p.out, short_workspace, Stream()), Error);
  p.mlp.interleave = 16;
  EXPECT_THROW(p.forward(), Error);
  p.mlp.interleave = 0;
  p.mlp.w2 = p.w1.view();
  EXPECT_THROW(p.forward(), Error);
}

}  // namespace
}  // namespace moiety::gemm
