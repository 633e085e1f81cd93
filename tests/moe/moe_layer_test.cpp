// The MoE layer on 1 to 4 ranks against a dense computation in double, and against itself.
#include "moiety/moe/moe_layer.h"

#include "tests/moe/moe_layer_problem.h"

namespace moiety::moe {
namespace {

using namespace whole_layer;

// The norm of the difference over the norm of what is wanted.
double distance(const Values& got, const Values& want) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return std::sqrt(difference) / std::max(std::sqrt(norm), 1e-30);
}

void expect_near(const Problem& p, const Result& got, const Result& want, double bound) {
  EXPECT_LT(distance(got.out, want.out), bound);
  EXPECT_LT(distance(got.dh, want.dh), bound);
  EXPECT_LT(distance(got.d_router, want.d_router), bound);
  EXPECT_LT(distance(got.dw1, want.dw1), bound);
  EXPECT_LT(distance(got.dw2, want.dw2), bound);
  if (p.b1.empty()) return;
  EXPECT_LT(distance(got.db1, want.db1), bound);
  EXPECT_LT(distance(got.db2, want.db2), bound);
}

double bound_of(DType dtype) { return dtype == DType::kFloat32 ? 1e-6 : 8e-3; }

TEST(MoeLayer, EveryLayoutEqualsTheDenseComputation) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const Reduction reduction : {Reduction::kRank, Reduction::kRankFp32, Reduction::kToken}) {
      // Partial sums of float32 rows are float32 anyway.
      if (dtype == DType::kFloat32 && reduction == Reduction::kRankFp32) continue;
      const Problem p = make_problem(small_config(dtype, reduction), 24);
      const Result want = expected(p);
      for (const Layout& layout : layouts()) {
        SCOPED_TRACE(text("{}, {}, reduction {}", layout.name, name(dtype), int(reduction)));
        expect_near(p, computed(p, layout), want, bound_of(dtype));
      }
    }
  }
}

// With kToken a token's sum does not depend on the ranks, and an expert's rows have one order.
TEST(MoeLayer, TokenOrderGivesTheSameBitsInEveryLayout) {
  const Problem p = make_problem(small_config(DType::kFloat32, Reduction::kToken), 24);
  const Result one = computed(p, layouts()[0]);
  for (const Layout& layout : layouts()) {
    SCOPED_TRACE(layout.name);
    const Result r = computed(p, layout);
    EXPECT_EQ(r.out, one.out);
    EXPECT_EQ(r.dh, one.dh);
    EXPECT_EQ(r.dw1, one.dw1);
    EXPECT_EQ(r.dw2, one.dw2);
    EXPECT_LT(distance(r.d_router, one.d_router), 1e-6);
  }
}

struct Variant {
  const char* name;
  std::function<void(Problem&)> change;
};

TEST(MoeLayer, Variants) {
  const std::vector<Variant> variants = {
      {"biases",
       [](Problem& p) {
         p.b1 = stored(p.config.dtype, random_values(p.experts() * 2 * p.config.ffn, 6));
         p.b2 = stored(p.config.dtype, random_values(p.experts() * p.config.model, 7));
       }},
      {"addends",
       [](Problem& p) {
         p.addend = stored(DType::kFloat32, random_values(p.h.size(), 8));
         p.dh_addend = stored(p.config.dtype, random_values(p.h.size(), 9));
       }},
      {"masked tokens", [](Problem& p) { p.mask[0] = p.mask[11] = p.mask[12] = 0; }},
      {"all masked", [](Problem& p) { std::fill(p.mask.begin(), p.mask.end(), 0); }},
      {"one hot expert", [](Problem& p) { p.router_bias = {0, 0, 0, 9, 0, 0}; }},
      {"sigmoid in groups",
       [](Problem& p) {
         p.config.router.score = Score::kSigmoid;
         p.config.router.groups = 3;
         p.config.router.group_top_k = 2;
         p.router_bias = stored(DType::kFloat32, random_values(6, 10, 0.1));
       }},
      {"aligned rows", [](Problem& p) { p.config.alignment = 16; }},
      {"every expert", [](Problem& p) { p.config.router.top_k = 6; }},
      {"one choice",
       [](Problem& p) {
         p.config.router.top_k = 1;
         p.config.router.renormalize = false;
       }},
  };
  const Layout& layout = layouts()[2];
  for (const Variant& variant : variants) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      SCOPED_TRACE(text("{}, {}", variant.name, name(dtype)));
      Problem p = make_problem(small_config(dtype, Reduction::kRank), 24);
      variant.change(p);
      expect_near(p, computed(p, layout), expected(p), bound_of(dtype));
    }
  }
}

// More ranks than experts: some own none.
TEST(MoeLayer, RanksWithoutExperts) {
  MoeConfig config = small_config(DType::kFloat32, Reduction::kRank);
  config.router.experts = 2;
  config.router.top_k = 1;
  const Problem p = make_problem(config, 24);
  expect_near(p, computed(p, layouts()[3]), expected(p), bound_of(DType::kFloat32));
}

TEST(MoeLayer, SecondMicroBatchAddsToTheGradients) {
  const Problem p = make_problem(small_config(DType::kFloat32, Reduction::kRank), 24);
  Result once = empty_result(p), twice = once;
  on_ranks(p, layouts()[1], [&](Rank& rank) {
    std::fill_n(rank.dw1.data<float>(), rank.dw1.view().numel(), NAN);
    for (int pass = 0; pass < 2; ++pass) {
      rank.forward(rank.ample());
      rank.backward(pass == 0 ? 0.0f : 1.0f);
      if (pass == 0) {
        rank.collect(once);
        // Back to this rank's own share.
        const float share = 1.0f / rank.group.ranks();
        for (int64_t i = 0; i < rank.d_router.view().numel(); ++i) {
          rank.d_router.data<float>()[i] *= share;
        }
      }
    }
    rank.collect(twice);
  });
  for (const auto member : {&Result::dw1, &Result::dw2}) {
    for (size_t i = 0; i < (once.*member).size(); ++i) {
      EXPECT_EQ((twice.*member)[i], 2 * (once.*member)[i]);
    }
  }
  for (size_t i = 0; i < once.d_router.size(); ++i) {
    EXPECT_NEAR(twice.d_router[i], 2 * once.d_router[i], 1e-5);
  }
}

TEST(MoeLayer, EvaluationKeepsNothingAndGivesTheSame) {
  const Problem p = make_problem(small_config(DType::kBFloat16, Reduction::kRank), 24);
  on_ranks(p, layouts()[2], [&](Rank& rank) {
    rank.forward(rank.ample(), false);
    EXPECT_EQ(rank.arena.in_use(), 0);
    const Values out = Router::read(rank.out);
    const Arena::Mark before = rank.arena.mark();
    rank.forward(rank.ample());
    EXPECT_EQ(Router::read(rank.out), out);
    const int64_t kept = rank.arena.in_use();
    EXPECT_GT(kept, 0);
    rank.backward();
    EXPECT_EQ(rank.arena.in_use(), kept);
    rank.arena.release(before);
    EXPECT_EQ(rank.arena.in_use(), 0);
  });
}

// Too little capacity is reported alike on all ranks; with what was required nothing is dropped and
// the result is that of ample capacity.
TEST(MoeLayer, OverflowIsReportedAndRepeatedWithMore) {
  MoeConfig config = small_config(DType::kFloat32, Reduction::kRank);
  config.overflow = OverflowPolicy::kReport;
  Problem p = make_problem(config, 24);
  p.router_bias = {0, 0, 0, 9, 0, 0};  // all tokens choose expert 3
  const Result want = computed(p, layouts()[3]);
  Result dropped = empty_result(p), repeated = dropped;
  on_ranks(p, layouts()[3], [&](Rank& rank) {
    const int64_t balanced = rank.layer.capacity_for(1.25, 24);
    EXPECT_EQ(balanced, 15);  // 1.25 * 24 tokens * 2 choices / 4 ranks
    MoeStats stats = rank.forward(balanced);
    EXPECT_TRUE(stats.overflow);
    EXPECT_EQ(stats.capacity, balanced);
    EXPECT_GE(stats.required, 24);
    EXPECT_GE(stats.dropped, stats.required - balanced);
    rank.backward();
    rank.collect(dropped);
    stats = rank.forward(stats.required);
    EXPECT_FALSE(stats.overflow);
    EXPECT_EQ(stats.dropped, 0);
    rank.backward();
    rank.collect(repeated);
  });
  EXPECT_EQ(repeated.out, want.out);
  EXPECT_EQ(repeated.dh, want.dh);
  EXPECT_EQ(repeated.dw1, want.dw1);
  EXPECT_NE(dropped.out, want.out);
  for (double x : dropped.dh) EXPECT_TRUE(std::isfinite(x));
}

TEST(MoeLayer, OverflowIsAnErrorByDefault) {
  const Problem p = make_problem(small_config(DType::kFloat32, Reduction::kRank), 24);
  on_ranks(p, layouts()[1], [&](Rank& rank) {
    rank.forward(3);
    const std::string message = error_of([&] { rank.group.check(rank.saved.plan.epoch); });
    EXPECT_NE(message.find("capacity 3"), std::string::npos) << message;
  });
}

TEST(MoeLayer, ErrorsNameTheArgument) {
  const Problem p = make_problem(small_config(DType::kFloat32, Reduction::kRank), 24);
  on_ranks(p, layouts()[0], [&](Rank& rank) {
    MoeConfig other = p.config;
    other.router.experts = 8;
    EXPECT_EQ(error_of([&] { MoeLayer(other, rank.group); }),
              "moe_layer: group \"ep\" has 6 experts, the router 8");
    other = p.config;
    other.dtype = DType::kFloat16;
    EXPECT_EQ(error_of([&] { MoeLayer(other, rank.group); }),
              "moe_layer: dtype float16 must be float32 or bfloat16");
    rank.h = Tensor(DType::kBFloat16, {24, 16});
    EXPECT_EQ(error_of([&] { rank.forward(rank.ample()); }),
              "moe_layer: h_TD is bfloat16[24, 16], expected float32[*, 16]");
  });
}

}  // namespace
}  // namespace moiety::moe
