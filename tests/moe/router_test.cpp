// The router: choice, weights, statistics, losses by hand, gradients by differences.
#include <bit>
#include <cmath>
#include <numbers>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/parallel.h"
#include "tests/moe/router_helpers.h"
#include "tests/support/tensors.h"

namespace moiety::moe {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
const float kLn2 = std::numbers::ln2_v<float>;
const float kLn3 = std::log(3.0f);

std::vector<double> identity(int64_t n) {
  std::vector<double> w(n * n);
  for (int64_t i = 0; i < n; ++i) w[i * n + i] = 1;
  return w;
}

// Four tokens over three experts with p = (1/2 1/4 1/4) twice, (1/4 1/2 1/4), (1/5 1/5 3/5).
std::vector<double> hand_logits() { return {kLn2, 0, 0, kLn2, 0, 0, 0, kLn2, 0, 0, 0, kLn3}; }

struct HandCase {
  const char* name;
  RouterConfig config;
  int64_t segments;
  std::vector<int64_t> counts;
  double aux;
};

TEST(RouterLosses, FourTokensThreeExpertsByHand) {
  const std::vector<HandCase> cases = {
      {"switch_k1", {.experts = 3, .top_k = 1, .aux = AuxLoss::kSwitch}, 1, {2, 1, 1, 4}, 1.021875},
      {"hf_k1", {.experts = 3, .top_k = 1, .aux = AuxLoss::kHf}, 1, {2, 1, 1, 4}, 1.021875},
      {"switch_k2",
       {.experts = 3, .top_k = 2, .aux = AuxLoss::kSwitch},
       1,
       {4, 3, 1, 4},
       1.0078125},
      {"hf_k2", {.experts = 3, .top_k = 2, .aux = AuxLoss::kHf}, 1, {4, 3, 1, 4}, 2.015625},
      {"sequence",
       {.experts = 3, .top_k = 1, .aux = AuxLoss::kSequence},
       2,
       {2, 0, 0, 2, 0, 1, 1, 2},
       1.33125},
      {"none", {.experts = 3, .top_k = 3, .aux = AuxLoss::kNone}, 1, {4, 4, 4, 4}, 0},
  };
  const double ln4 = std::log(4.0), ln5 = std::log(5.0);
  for (const HandCase& c : cases) {
    SCOPED_TRACE(c.name);
    Router run(c.config, hand_logits(), identity(3), DType::kFloat32, c.segments);
    run.forward();
    EXPECT_EQ(run.counts(), c.counts);
    EXPECT_NEAR(run.losses()[0], c.aux, 1e-6);
    EXPECT_NEAR(run.losses()[1], (3 * ln4 * ln4 + ln5 * ln5) / 4, 1e-6);
  }
}

TEST(RouterLosses, HfPoolsLayersBeforeTheProduct) {
  const RouterConfig config{.experts = 3, .top_k = 1, .aux = AuxLoss::kHf};
  Router a(config, hand_logits(), identity(3));
  Router b(config, {0, 0, kLn3, 0, 0, kLn3, 0, 0, kLn3, 0, 0, kLn3}, identity(3));
  a.forward();
  b.forward();
  for (int64_t e = 0; e < 4; ++e) {
    a.count.data<int64_t>()[e] += b.count.data<int64_t>()[e];
    a.sum.data<double>()[e] += b.sum.data<double>()[e];
  }
  EXPECT_NEAR(a.losses()[0], 1.18359375, 1e-6);
  // The z loss adds up over layers: its mean is over the tokens of the scope.
  const double ln4 = std::log(4.0), ln5 = std::log(5.0);
  EXPECT_NEAR(a.losses()[1], (3 * ln4 * ln4 + 5 * ln5 * ln5) / 4, 1e-6);
}

TEST(RouterLosses, OneExpertTakesAllGivesE) {
  for (const AuxLoss aux : {AuxLoss::kSwitch, AuxLoss::kHf, AuxLoss::kSequence}) {
    std::vector<double> logits(5 * 8, 0.0);
    for (int t = 0; t < 5; ++t) logits[t * 8 + 3] = 200;
    Router run({.experts = 8, .top_k = 1, .aux = aux}, logits, identity(8));
    run.forward();
    EXPECT_DOUBLE_EQ(run.losses()[0], 8.0);
  }
}

TEST(RouterLosses, SigmoidSharesAreNormalized) {
  // sigma(0) = 1/2, sigma(ln 3) = 3/4: q = (3/4, 1/2, 1/2) / (7/4).
  Router run({.experts = 3, .top_k = 1, .score = Score::kSigmoid, .aux = AuxLoss::kSwitch},
             {kLn3, 0, 0}, identity(3));
  run.forward();
  EXPECT_NEAR(run.sum.data<double>()[0], 3.0 / 7, 1e-6);
  EXPECT_NEAR(run.sum.data<double>()[2], 2.0 / 7, 1e-6);
  EXPECT_NEAR(run.losses()[0], 9.0 / 7, 1e-6);
}

TEST(RouterLosses, NoTokensGiveZero) {
  for (const AuxLoss aux : {AuxLoss::kSwitch, AuxLoss::kHf, AuxLoss::kSequence}) {
    Router run({.experts = 3, .top_k = 1, .aux = aux}, {}, identity(3));
    run.forward();
    EXPECT_EQ(run.losses(), (std::array<double, 2>{0, 0}));
    run.backward();
    EXPECT_EQ(run.counts(), (std::vector<int64_t>{0, 0, 0, 0}));
    for (double x : Router::read(run.dw)) EXPECT_EQ(x, 0);
  }
}

struct ChoiceCase {
  const char* name;
  RouterConfig config;
  std::vector<float> logits, bias;
  std::vector<int32_t> idx;
};

TEST(RouterChoice, TiesInfinitiesNanAndGroups) {
  constexpr Score kSig = Score::kSigmoid;
  const std::vector<ChoiceCase> cases = {
      {"descending", {.experts = 4, .top_k = 2}, {1, 3, 2, 0}, {}, {1, 2}},
      {"ties by index", {.experts = 4, .top_k = 3}, {1, 2, 1, 2}, {}, {1, 3, 0}},
      {"all equal", {.experts = 5, .top_k = 3}, {7, 7, 7, 7, 7}, {}, {0, 1, 2}},
      {"K = E", {.experts = 3, .top_k = 3}, {0, 2, 1}, {}, {1, 2, 0}},
      {"E = 1", {.experts = 1, .top_k = 1}, {-3}, {}, {0}},
      {"-inf last", {.experts = 4, .top_k = 4}, {-kInf, 1, -kInf, 0}, {}, {1, 3, 0, 2}},
      {"all -inf", {.experts = 3, .top_k = 2}, {-kInf, -kInf, -kInf}, {}, {0, 1}},
      {"+inf poisons a softmax", {.experts = 3, .top_k = 2}, {0, kInf, 0}, {}, {0, 1}},
      {"+inf wins a sigmoid", {.experts = 3, .top_k = 2, .score = kSig}, {0, kInf, 1}, {}, {1, 2}},
      {"NaN row", {.experts = 4, .top_k = 3}, {kNan, kNan, kNan, kNan}, {}, {0, 1, 2}},
      {"NaN last", {.experts = 4, .top_k = 4, .score = kSig}, {kNan, 1, kNan, 2}, {}, {3, 1, 0, 2}},
      {"NaN after -inf",
       {.experts = 3, .top_k = 3, .score = kSig},
       {0, 0, 0},
       {kNan, -kInf, 0},
       {2, 1, 0}},
      // sigma(-200) is +0; with a bias of -0 or +0 the sums are zeros of either sign.
      {"-0 equals +0",
       {.experts = 3, .top_k = 3, .score = kSig},
       {-200, -200, -200},
       {-0.0f, 0.0f, -0.0f},
       {0, 1, 2}},
      {"bias moves the choice", {.experts = 3, .top_k = 1}, {2, 1, 0}, {0, 0, 5}, {2}},
      // Groups {0 1 2} {3 4 5}: the sums of the two largest are 9 + 1 and 6 + 5 (by bias).
      {"group of the best two",
       {.experts = 6, .top_k = 2, .groups = 2, .group_top_k = 1},
       {0, 0, 0, 0, 0, 0},
       {9, 1, 0, 6, 5, 0},
       {3, 4}},
      {"two of three groups",
       {.experts = 6, .top_k = 3, .groups = 3, .group_top_k = 2},
       {0, 0, 0, 0, 0, 0},
       {1, 1, 5, 0, 0, 4},
       {2, 5, 3}},
      {"groups of one",
       {.experts = 3, .top_k = 1, .groups = 3, .group_top_k = 1},
       {0, 2, 1},
       {},
       {1}},
      {"equal groups",
       {.experts = 4, .top_k = 2, .groups = 2, .group_top_k = 1},
       {1, 0, 0, 1},
       {},
       {0, 1}},
      {"NaN group last",
       {.experts = 4, .top_k = 2, .score = kSig, .groups = 2, .group_top_k = 1},
       {kNan, 9, 0, 1},
       {},
       {3, 2}},
      {"all in NaN groups",
       {.experts = 4, .top_k = 2, .groups = 2, .group_top_k = 1},
       {kNan, kNan, kNan, kNan},
       {},
       {2, 3}},
  };
  for (const ChoiceCase& c : cases) {
    SCOPED_TRACE(c.name);
    check(c.config);
    EXPECT_EQ(route(c.config, c.logits, 1, c.bias).idx, c.idx);
  }
}

TEST(RouterChoice, AnyInputGivesDistinctExperts) {
  std::mt19937 rng(7);
  const std::array<float, 8> odd = {kNan, kInf, -kInf, 0.0f, -0.0f, 1e30f, -1e30f, 1.0f};
  for (const Score score : {Score::kSoftmax, Score::kSigmoid}) {
    for (const int64_t groups : {1, 4}) {
      const RouterConfig config{.experts = 16,
                                .top_k = 5,
                                .score = score,
                                .groups = groups,
                                .group_top_k = (groups + 1) / 2};
      std::vector<float> logits(64 * 16), bias(16);
      for (float& x : logits) x = odd[rng() % odd.size()];
      for (float& x : bias) x = odd[rng() % odd.size()];
      for (const auto& b : {std::vector<float>{}, bias}) {
        const Routed<float> r = route(config, logits, 1, b);
        for (int t = 0; t < 64; ++t) {
          const std::set<int32_t> chosen(r.idx.begin() + t * 5, r.idx.begin() + (t + 1) * 5);
          EXPECT_EQ(chosen.size(), 5u);
          EXPECT_GE(*chosen.begin(), 0);
          EXPECT_LT(*chosen.rbegin(), 16);
        }
      }
    }
  }
}

TEST(RouterChoice, WeightsComeFromScoresWithoutBias) {
  // p = (1/2 1/4 1/4); the bias chooses experts 2 and 0, in this order.
  const std::vector<float> logits = {kLn2, 0, 0}, bias = {0, 0, 1};
  RouterConfig config{.experts = 3, .top_k = 2, .renormalize = false, .scale = 2.5f};
  Routed<float> r = route(config, logits, 1, bias);
  EXPECT_EQ(r.idx, (std::vector<int32_t>{2, 0}));
  EXPECT_NEAR(r.weight[0], 2.5 / 4, 1e-6);
  EXPECT_NEAR(r.weight[1], 2.5 / 2, 1e-6);
  config.renormalize = true;
  r = route(config, logits, 1, bias);
  EXPECT_NEAR(r.weight[0], 2.5 / 3, 1e-6);
  EXPECT_NEAR(r.weight[1], 2.5 * 2 / 3, 1e-6);
}

TEST(RouterChoice, MaskedTokensAreInNoStatistic) {
  const RouterConfig config{
      .experts = 3, .top_k = 2, .aux = AuxLoss::kSwitch, .aux_coef = 0.1f, .z_coef = 0.1f};
  const auto logits = hand_logits();
  Router run(config, logits, identity(3));
  Tensor mask(DType::kUInt8, {4});
  const uint8_t bits[4] = {1, 0, 0, 1};
  std::copy_n(bits, 4, mask.data<uint8_t>());
  run.mask = mask;
  run.forward();
  EXPECT_EQ(run.counts(), (std::vector<int64_t>{2, 1, 1, 2}));
  for (int i = 2; i < 6; ++i) {
    EXPECT_EQ(run.idx.data<int32_t>()[i], -1);
    EXPECT_EQ(run.weight.data<float>()[i], 0.0f);
  }
  EXPECT_NEAR(run.sum.data<double>()[0], 0.5 + 0.2, 1e-6);
  std::fill_n(run.dweight.data<float>(), 8, 1.0f);
  run.backward();
  const auto dh = Router::read(run.dh);
  for (int i = 3; i < 9; ++i) EXPECT_EQ(dh[i], 0.0);
  EXPECT_NE(dh[0], 0.0);
  // The other tokens are as if the masked ones were not there.
  Router rest(config, {kLn2, 0, 0, 0, 0, kLn3}, identity(3));
  rest.forward();
  std::fill_n(rest.dweight.data<float>(), 4, 1.0f);
  rest.backward();
  EXPECT_EQ(Router::read(rest.dw), Router::read(run.dw));
  EXPECT_EQ(rest.losses(), run.losses());
}

TEST(RouterChoice, ForcedBalanceIsDistinctAndEven) {
  Router run({.experts = 8, .top_k = 3, .force_balance = true}, random_values(16 * 4, 1),
             random_values(8 * 4, 2));
  run.forward();
  EXPECT_EQ(run.counts(), (std::vector<int64_t>{6, 6, 6, 6, 6, 6, 6, 6, 16}));
  EXPECT_EQ(run.idx.data<int32_t>()[3 * 5 + 2], (5 * 3 + 2) % 8);
}

// Any NaN is like any other.
std::vector<uint32_t> canonical_bits(const std::vector<float>& v) {
  std::vector<uint32_t> bits;
  for (float x : v) bits.push_back(std::bit_cast<uint32_t>(std::isnan(x) ? kNan : x));
  return bits;
}

void expect_cpu_equals_reference(const RouterConfig& config, const std::vector<float>& logits) {
  const int64_t experts = config.experts, tokens = logits.size() / experts;
  const Routed<float> want = route(config, logits);
  Routed<float> got = want;
  detail::forward_block_cpu(
      {config, logits.data(), nullptr, nullptr, nullptr, got.idx.data(), got.weight.data()}, 0,
      tokens, got.count.data(), got.sum.data());
  EXPECT_EQ(got.idx, want.idx);
  EXPECT_EQ(got.count, want.count);
  EXPECT_EQ(canonical_bits(got.weight), canonical_bits(want.weight));
  EXPECT_EQ(canonical_bits(got.sum), canonical_bits(want.sum));

  const auto dq_values = random_values(experts, 4);
  const std::vector<float> dq(dq_values.begin(), dq_values.end());
  std::vector<float> dx(tokens * experts), dx_want = dx;
  detail::backward_block<float>(
      {config, logits.data(), want.idx.data(), want.weight.data(), dx_want.data()}, 0, tokens,
      dq.data(), 0.25f);
  detail::backward_block_cpu(
      {config, logits.data(), want.idx.data(), want.weight.data(), dx.data()}, 0, tokens, dq.data(),
      0.25f);
  EXPECT_EQ(canonical_bits(dx), canonical_bits(dx_want));
}

TEST(RouterCpu, EqualsReferenceBitwise) {
  for (const int64_t experts : {1, 2, 3, 8, 33, 64, 100, 256, 257, 1024}) {
    for (const Score score : {Score::kSoftmax, Score::kSigmoid}) {
      SCOPED_TRACE(experts);
      const RouterConfig config{.experts = experts,
                                .top_k = std::min<int64_t>(experts, 8),
                                .score = score,
                                .scale = 1.5f,
                                .z_coef = 0.1f};
      const auto values = random_values(19 * experts, 3, 4);
      std::vector<float> logits(values.begin(), values.end());
      expect_cpu_equals_reference(config, logits);
      logits[0] = kNan;
      logits[5 * experts] = kInf;
      logits.back() = -kInf;
      expect_cpu_equals_reference(config, logits);
    }
  }
}

TEST(RouterForward, StatisticsAreBlockSumsWhateverTheThreads) {
  const RouterConfig config{.experts = 8, .top_k = 2, .aux = AuxLoss::kSequence};
  const int64_t tokens = 300, segments = 2;  // blocks of 64, 64, 22 in each
  const auto h = random_values(tokens * 5, 1), w = random_values(8 * 5, 2);
  Router run(config, h, w, DType::kFloat32, segments);
  const int budget = thread_budget();
  std::vector<double> first;
  for (const int threads : {1, 2, 3}) {
    set_thread_budget(threads);
    run.forward();
    const std::vector<double> sums(run.sum.data<double>(), run.sum.data<double>() + 18);
    if (first.empty()) first = sums;
    EXPECT_EQ(sums, first);
  }
  set_thread_budget(budget);
  const std::vector<float> logits(run.logits.data<float>(), run.logits.data<float>() + tokens * 8);
  for (int64_t s = 0; s < segments; ++s) {
    std::array<double, 9> want{};
    for (const auto& [begin, end] : {std::pair{0, 64}, {64, 128}, {128, 150}}) {
      const Routed<float> block =
          route(config, std::vector<float>(logits.begin() + (s * 150 + begin) * 8,
                                           logits.begin() + (s * 150 + end) * 8));
      for (int e = 0; e < 9; ++e) want[e] += block.sum[e];
    }
    for (int e = 0; e < 9; ++e) EXPECT_EQ(first[s * 9 + e], want[e]);
  }
}

// ---- Gradients. The objective, from the definitions of docs/spec/trainer.md#router, in double:
// the weights against dweight, plus n times the losses, whose f is held fixed.
struct GradientCase {
  const char* name;
  RouterConfig config;
  bool masked = false;
};

double objective(const RouterConfig& c, const std::vector<double>& x, int64_t segments,
                 const std::vector<uint8_t>& mask, const std::vector<double>& dweight,
                 const std::vector<int32_t>& fixed_count, int64_t layers, double targets) {
  const int64_t e1 = c.experts + 1;
  const Routed<double> r = route(c, x, segments, {}, mask);
  EXPECT_EQ(r.count, fixed_count) << "the step crosses a border of the choice";
  double tokens = 0, lse2 = 0, aux = 0;
  for (int64_t s = 0; s < segments; ++s) {
    tokens += r.count[s * e1 + c.experts];
    lse2 += r.sum[s * e1 + c.experts];
  }
  for (int64_t s = 0; s < segments; ++s) {
    const double length = r.count[s * e1 + c.experts];
    for (int64_t e = 0; e < c.experts; ++e) {
      const double pairs = r.count[s * e1 + e], q = r.sum[s * e1 + e];
      const double experts = c.experts, top_k = c.top_k;
      if (c.aux == AuxLoss::kSwitch) aux += experts * pairs / (top_k * tokens) * q / tokens;
      // This layer's part of layers that are all like it: f pools their counts, P their sums.
      if (c.aux == AuxLoss::kHf) aux += experts * pairs / tokens * q / (layers * tokens);
      if (c.aux == AuxLoss::kSequence) {
        aux += length / tokens * (pairs * experts / (top_k * length)) * q / length;
      }
    }
  }
  double out = targets * (c.aux_coef * aux + c.z_coef * lse2 / tokens);
  for (size_t i = 0; i < dweight.size(); ++i) out += dweight[i] * r.weight[i];
  return out;
}

TEST(RouterBackward, EqualsCentralDifferencesInDouble) {
  constexpr Score kSoft = Score::kSoftmax, kSig = Score::kSigmoid;
  const RouterConfig base{.experts = 6, .top_k = 3, .scale = 1.7f};
  const auto with = [&](Score score, bool renormalize, AuxLoss aux, float z) {
    RouterConfig c = base;
    c.score = score;
    c.renormalize = renormalize;
    c.aux = aux;
    c.aux_coef = aux == AuxLoss::kNone ? 0.0f : 0.5f;
    c.z_coef = z;
    return c;
  };
  RouterConfig grouped = with(kSoft, true, AuxLoss::kSwitch, 0.25f);
  grouped.groups = 3;
  grouped.group_top_k = 2;
  const std::vector<GradientCase> cases = {
      {"softmax renormalized", with(kSoft, true, AuxLoss::kNone, 0)},
      {"softmax plain", with(kSoft, false, AuxLoss::kNone, 0)},
      {"sigmoid renormalized", with(kSig, true, AuxLoss::kNone, 0)},
      {"sigmoid plain", with(kSig, false, AuxLoss::kNone, 0)},
      {"softmax switch z", with(kSoft, true, AuxLoss::kSwitch, 0.25f)},
      {"softmax hf", with(kSoft, true, AuxLoss::kHf, 0)},
      {"softmax sequence", with(kSoft, true, AuxLoss::kSequence, 0)},
      {"sigmoid switch", with(kSig, true, AuxLoss::kSwitch, 0)},
      {"sigmoid sequence z", with(kSig, false, AuxLoss::kSequence, 0.25f)},
      {"groups", grouped},
      {"masked sequence", with(kSig, true, AuxLoss::kSequence, 0.25f), true},
      {"masked hf", with(kSoft, true, AuxLoss::kHf, 0.25f), true},
  };
  const int64_t experts = 6, tokens = 8, layers = 3, targets = 5;
  for (const GradientCase& c : cases) {
    SCOPED_TRACE(c.name);
    const RouterConfig& config = c.config;
    const int64_t segments = config.aux == AuxLoss::kSequence ? 2 : 1, length = tokens / segments;
    const std::vector<uint8_t> mask =
        c.masked ? std::vector<uint8_t>{1, 0, 1, 1, 1, 1, 1, 0} : std::vector<uint8_t>(8, 1);
    std::vector<double> x = random_values(tokens * experts, 21);
    const std::vector<double> dweight = random_values(tokens * config.top_k, 22);
    const Routed<double> r = route(config, x, segments, {}, mask);
    const int64_t scope = std::accumulate(mask.begin(), mask.end(), int64_t{0});

    std::vector<double> dx(x.size());
    for (int64_t s = 0; s < segments; ++s) {
      const int32_t* count = r.count.data() + s * (experts + 1);
      const int64_t pooled = config.aux == AuxLoss::kHf ? layers : 1;
      const int64_t n = detail::aux_tokens(config, pooled * count[experts], scope);
      std::vector<double> dq(experts);
      for (int64_t e = 0; e < experts; ++e) {
        dq[e] = config.aux_coef * double(targets) / double(n) *
                detail::aux_slope(config, pooled * count[e], pooled * count[experts]);
      }
      detail::backward_block<double>({config, x.data(), r.idx.data(), dweight.data(), dx.data()},
                                     s * length, (s + 1) * length,
                                     config.aux == AuxLoss::kNone ? nullptr : dq.data(),
                                     2.0 * config.z_coef * double(targets) / double(scope));
    }
    for (size_t i = 0; i < x.size(); ++i) {
      const double at = x[i], step = 1e-5;
      const auto value = [&](double v) {
        x[i] = v;
        return objective(config, x, segments, mask, dweight, r.count, layers, targets);
      };
      const double slope = (value(at + step) - value(at - step)) / (2 * step);
      x[i] = at;
      EXPECT_NEAR(dx[i], slope, 1e-6 * std::max(1.0, std::abs(slope))) << i;
    }
  }
}

TEST(RouterBackward, HfOfEqualLayersIsSwitchScaled) {
  // hf(c) = switch(c K / L').
  const int64_t layers = 3;
  const auto h = random_values(40 * 7, 1), w = random_values(6 * 7, 2);
  RouterConfig config{.experts = 6, .top_k = 2, .aux = AuxLoss::kSwitch, .aux_coef = 0.02f * 2 / 3};
  Router a(config, h, w);
  a.forward();
  a.backward();
  config.aux = AuxLoss::kHf;
  config.aux_coef = 0.02f;
  Router b(config, h, w);
  b.forward();
  for (int e = 0; e < 7; ++e) b.count.data<int64_t>()[e] *= layers;
  b.backward();
  const auto want = Router::read(a.dh), got = Router::read(b.dh);
  double largest = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_NEAR(got[i], want[i], 1e-7);
    largest = std::max(largest, std::abs(want[i]));
  }
  EXPECT_GT(largest, 1e-4);
}

TEST(RouterBackward, SummedStatisticsGiveTheGlobalObjective) {
  // Two ranks with half of the tokens each, against one with all.
  const auto h = random_values(64 * 7, 1), w = random_values(8 * 7, 2);
  for (const AuxLoss aux : {AuxLoss::kSwitch, AuxLoss::kHf, AuxLoss::kSequence}) {
    const int64_t segments = aux == AuxLoss::kSequence ? 2 : 1;
    const RouterConfig config{
        .experts = 8, .top_k = 2, .aux = aux, .aux_coef = 0.1f, .z_coef = 0.01f};
    Router whole(config, h, w, DType::kFloat32, 2 * segments / (aux == AuxLoss::kSequence ? 1 : 2));
    Router left(config, {h.begin(), h.begin() + 32 * 7}, w, DType::kFloat32, segments);
    Router right(config, {h.begin() + 32 * 7, h.end()}, w, DType::kFloat32, segments);
    for (Router* r : {&whole, &left, &right}) r->forward();
    whole.backward();
    if (aux != AuxLoss::kSequence) {
      for (int64_t i = 0; i < segments * 9; ++i) {
        left.count.data<int64_t>()[i] += right.count.data<int64_t>()[i];
        right.count.data<int64_t>()[i] = left.count.data<int64_t>()[i];
      }
      EXPECT_EQ(left.counts(), whole.counts());
    }
    for (Router* r : {&left, &right}) {
      r->scope.data<int64_t>()[0] = r->scope.data<int64_t>()[1] = 64;
      r->backward();
    }
    const auto want = Router::read(whole.dh);
    auto got = Router::read(left.dh);
    const auto tail = Router::read(right.dh);
    got.insert(got.end(), tail.begin(), tail.end());
    for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-7);
  }
}

// The operation end to end: dW and dh are the products of dlogits with the stored operands.
TEST(RouterBackward, WeightAndInputGradients) {
  const int64_t tokens = 130, model = 12, experts = 8;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const RouterConfig config{
        .experts = experts, .top_k = 2, .aux = AuxLoss::kSwitch, .aux_coef = 0.1f, .z_coef = 0.01f};
    Router run(config, random_values(tokens * model, 1), random_values(experts * model, 2), dtype);
    run.forward();
    Router::fill(run.dweight, random_values(tokens * 2, 3));
    Router::fill(run.dw, random_values(experts * model, 5));
    const Tensor addend(DType::kFloat32, {tokens, model});
    Router::fill(addend, random_values(tokens * model, 4));
    run.addend = addend;
    const auto h = Router::read(run.h), w = Router::read(run.w);
    const auto before = Router::read(run.dw);
    auto dh = Router::read(addend), dw = before;
    run.backward(1);

    std::vector<float> dx(tokens * experts);
    std::vector<float> dq(experts);
    for (int64_t e = 0; e < experts; ++e) {
      dq[e] = float(0.1f * detail::aux_slope(config, run.counts()[e], tokens));
    }
    detail::backward_block<float>({config, run.logits.data<float>(), run.idx.data<int32_t>(),
                                   run.dweight.data<float>(), dx.data()},
                                  0, tokens, dq.data(), 2 * 0.01f);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t e = 0; e < experts; ++e) {
        for (int64_t d = 0; d < model; ++d) {
          dh[t * model + d] += double(dx[t * experts + e]) * w[e * model + d];
          dw[e * model + d] += double(dx[t * experts + e]) * h[t * model + d];
        }
      }
    }
    const auto got_dh = Router::read(run.dh), got_dw = Router::read(run.dw);
    const double ulp = dtype == DType::kFloat32 ? 0x1p-22 : 0x1p-8;
    for (size_t i = 0; i < dh.size(); ++i) {
      EXPECT_NEAR(got_dh[i], dh[i], ulp * std::abs(dh[i]) + 1e-6);
    }
    for (size_t i = 0; i < dw.size(); ++i) EXPECT_NEAR(got_dw[i], dw[i], 2e-5);
    // beta 0 does not read what was there; the addend may be dh itself.
    std::fill_n(run.dw.data<float>(), experts * model, kNan);
    Router::fill(run.dh, Router::read(addend));
    run.addend = run.dh;
    run.backward(0);
    const auto again = Router::read(run.dh), overwritten = Router::read(run.dw);
    for (size_t i = 0; i < dh.size(); ++i)
      EXPECT_NEAR(again[i], dh[i], 2 * ulp * (std::abs(dh[i]) + 1));
    for (size_t i = 0; i < dw.size(); ++i) {
      EXPECT_NEAR(overwritten[i], dw[i] - before[i], 2e-5);
    }
  }
}

TEST(RouterBias, MovesTowardsTheMean) {
  Tensor bias(DType::kFloat32, {4}), count(DType::kInt64, {4});
  const int64_t c[4] = {10, 2, 6, 6};
  std::copy_n(c, 4, count.data<int64_t>());
  std::fill_n(bias.data<float>(), 4, 1.0f);
  router_update_bias(bias, count, 0.25f, {});
  const std::vector<float> want = {0.75f, 1.25f, 1.0f, 1.0f};
  EXPECT_EQ(std::vector<float>(bias.data<float>(), bias.data<float>() + 4), want);
  // The mean need not be a whole number.
  count.data<int64_t>()[3] = 7;
  router_update_bias(bias, count, 0.25f, {});
  EXPECT_EQ(bias.data<float>()[2], 1.25f);
}

TEST(RouterBias, StaysWhereItIsSkipped) {
  Tensor bias(DType::kFloat32, {2}), count(DType::kInt64, {2}), skip(DType::kInt32, {1});
  count.data<int64_t>()[0] = 1;
  for (const int32_t skipped : {1, -1, 0}) {
    *skip.data<int32_t>() = skipped;
    router_update_bias(bias, count, 0.25f, {}, skip);
    EXPECT_EQ(bias.data<float>()[0], skipped ? 0.0f : -0.25f);
  }
  EXPECT_NE(error_of([&] { router_update_bias(bias, count, 0.25f, {}, count); }).find("skip"),
            std::string::npos);
}

RouterChooseArgs choice_of(const Router& r) {
  return {.logits_TE = r.logits,
          .bias_E = r.bias,
          .mask_T = r.mask,
          .idx_TK = r.idx,
          .weight_TK = r.weight,
          .stats = {r.count, r.sum},
          .workspace = r.forward_workspace};
}

const std::vector<RouterConfig> kChoices = {
    {.experts = 8, .top_k = 2, .aux = AuxLoss::kSwitch, .aux_coef = 0.1f, .z_coef = 0.01f},
    {.experts = 8, .top_k = 8, .score = Score::kSigmoid, .scale = 2.5f},
    {.experts = 8, .top_k = 3, .renormalize = false, .groups = 4, .group_top_k = 2},
};

TEST(RouterChoose, IsForwardAndBackwardWithoutTheProducts) {
  for (const RouterConfig& config : kChoices) {
    // With w the identity, the logits are h, and dh is their gradient.
    Router whole(config, random_values(70 * 8, 7), identity(8));
    Router parts = Router(config, random_values(70 * 8, 7), identity(8));
    Tensor mask(DType::kUInt8, {70}), dlogits(DType::kFloat32, {70, 8});
    for (int64_t t = 0; t < 70; ++t) mask.data<uint8_t>()[t] = t % 9 != 4;
    Router::fill(whole.dweight, random_values(70 * config.top_k, 9));
    whole.mask = parts.mask = mask;
    whole.forward();
    Router::fill(parts.logits, random_values(70 * 8, 7));
    router_choose(config, choice_of(parts), {});
    EXPECT_TRUE(same_bits(whole.idx, parts.idx));
    EXPECT_TRUE(same_bits(whole.weight, parts.weight));
    EXPECT_TRUE(same_bits(whole.count, parts.count));
    EXPECT_TRUE(same_bits(whole.sum, parts.sum));
    whole.backward();
    router_choose_backward(
        config, {parts.logits, parts.idx, whole.dweight, parts.count, whole.scope, dlogits}, {});
    EXPECT_TRUE(same_bits(whole.dh, dlogits));
  }
}

TEST(RouterChoose, RepeatsAChoiceThatIsGiven) {
  for (const RouterConfig& config : kChoices) {
    Router then(config, random_values(70 * 8, 11), identity(8));
    then.forward();
    Router now(config, random_values(70 * 8, 12), identity(8));
    Router::fill(now.logits, random_values(70 * 8, 12));
    const Tensor given = copy_of(then.idx);
    // Tokens 3 and 5 have no choice that could be repeated.
    given.data<int32_t>()[3 * config.top_k] = -1;
    given.data<int32_t>()[6 * config.top_k - 1] = 8;
    RouterChooseArgs args = choice_of(now);
    args.given_idx_TK = given;
    router_choose(config, args, {});
    std::vector<int64_t> pairs(9);
    for (int64_t t = 0; t < 70; ++t) {
      const bool none = t == 3 || t == 5;
      pairs[8] += !none;
      for (int64_t k = 0; k < config.top_k; ++k) {
        const int32_t e = now.idx.data<int32_t>()[t * config.top_k + k];
        EXPECT_EQ(e, none ? -1 : given.data<int32_t>()[t * config.top_k + k]);
        if (!none) ++pairs[e];
      }
    }
    EXPECT_EQ(now.counts(), pairs);
    // The weights are those of the live logits: given its own choice, a token has its own weights.
    Router own(config, random_values(70 * 8, 12), identity(8));
    own.forward();
    const Tensor weights = copy_of(own.weight);
    args = choice_of(own);
    const Tensor again = copy_of(own.idx);
    args.given_idx_TK = again;
    router_choose(config, args, {});
    EXPECT_TRUE(same_bits(weights, own.weight));
  }
}

TEST(RouterErrors, NameTheArgument) {
  EXPECT_EQ(error_of([] { check({.experts = 4, .top_k = 5}); }),
            "router: top_k=5 must be in [1, 4]");
  EXPECT_EQ(error_of([] { check({.experts = 4, .top_k = 2, .groups = 3}); }),
            "router: groups=3 must divide experts=4");
  EXPECT_EQ(error_of([] { check({.experts = 4, .top_k = 2, .groups = 4, .group_top_k = 1}); }),
            "router: group_top_k=1 groups of 1 experts are fewer than top_k=2");
  EXPECT_EQ(error_of([] { check({.experts = 4, .top_k = 2, .scale = kNan}); }),
            "router: scale=nan must be positive");

  const RouterConfig config{.experts = 3, .top_k = 1, .aux = AuxLoss::kSwitch};
  Router run(config, random_values(6 * 2, 1), random_values(3 * 2, 2), DType::kFloat32, 2);
  EXPECT_EQ(error_of([&] { run.forward(); }),
            "router_forward: count has 2 segments; only the loss of sequences has several");
  run.config.aux = AuxLoss::kSequence;
  run.segments = 4;
  run.count = Tensor(DType::kInt64, {4, 4});
  run.sum = Tensor(DType::kFloat64, {4, 4});
  EXPECT_EQ(error_of([&] { run.forward(); }),
            "router_forward: 6 tokens are not 4 sequences of equal length");
  Router small(config, random_values(6 * 2, 1), random_values(3 * 2, 2));
  small.forward_workspace = Tensor(DType::kUInt8, {31});
  EXPECT_EQ(error_of([&] { small.forward(); }),
            "router_forward: workspace is uint8[31], expected uint8[32]");
}

}  // namespace
}  // namespace moiety::moe
