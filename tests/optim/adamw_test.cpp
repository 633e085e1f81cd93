#include "moiety/optim/adamw.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/buffer.h"
#include "moiety/base/rng.h"
#include "moiety/formats/bf16.h"
#include "moiety/optim/step_decision.h"
#include "tests/support/bits.h"

namespace moiety::optim {
namespace {

uint32_t random_word(uint64_t i, uint32_t what) {
  return philox({1, 2}, {static_cast<uint32_t>(i), static_cast<uint32_t>(i >> 32), what, 0})[0];
}

// The tensors of a segment of n elements.
struct State {
  State(int64_t n, DType moments, DType weights)
      : grad(DType::kFloat32, {n}),
        master(DType::kFloat32, {n}),
        exp_avg(moments, {n}),
        exp_avg_sq(moments, {n}),
        weight(weights, {n}) {}
  Tensor grad, master, exp_avg, exp_avg_sq, weight;

  AdamWArgs args(const std::vector<ElementRun>& runs) const {
    return {grad, master, exp_avg, exp_avg_sq, weight, runs};
  }
  void copy_from(const State& other) {
    for (const auto& [to, from] : pairs(other)) {
      std::memcpy(to->view().raw(), from->view().raw(), to->view().bytes());
    }
  }
  // The names of what differs.
  std::string difference(const State& other) const {
    static constexpr std::array kNames{"grad", "master", "exp_avg", "exp_avg_sq", "weight"};
    std::string out;
    const auto list = pairs(other);
    for (size_t i = 0; i < list.size(); ++i) {
      const auto& [a, b] = list[i];
      if (std::memcmp(a->view().raw(), b->view().raw(), a->view().bytes()) != 0) out += kNames[i];
    }
    return out;
  }

 private:
  std::array<std::pair<const Tensor*, const Tensor*>, 5> pairs(const State& o) const {
    return {{{&grad, &o.grad},
             {&master, &o.master},
             {&exp_avg, &o.exp_avg},
             {&exp_avg_sq, &o.exp_avg_sq},
             {&weight, &o.weight}}};
  }
};

using Update = void (*)(const AdamW&, uint64_t, TensorView, const AdamWTable&, Stream);
void run(Update update, const AdamW& adam, AdamWStep step, const AdamWArgs& args,
         uint64_t seed = 0) {
  update(adam, seed, {&step, DType::kUInt8, {sizeof step}}, {{&args, 1}, Device{}}, Stream());
}

const AdamW kAdam{.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8};

TEST(AdamW, Golden) {
  for (const Update update : {adamw, adamw_reference}) {
    State x(1, DType::kFloat32, DType::kBFloat16);
    *x.master.data<float>() = 1.0f;
    const std::vector<ElementRun> runs{{.begin = 0, .end = 1}};
    StepState state;
    const StepRuleConfig rule{.beta1 = 0.9, .beta2 = 0.95};
    struct Expected {
      float sum;
      uint32_t g, m, v, p, k1, k2;
    };
    for (const Expected& e :
         {Expected{0.75f, 0x3E800000, 0x3CCCCCCD, 0x3B4CCCCD, 0x3F7FB7E9, 0x41200000, 0x41A00000},
          Expected{-3.0f, 0xBF800000, 0xBD9EB852, 0x3D58F5C3, 0x3F7FD5A2, 0x40A86BCA,
                   0x41241A42}}) {
      const StepDecision d = decide(rule, 0, {.sumsq = 1, .tokens = 3}, state);
      EXPECT_EQ(bits_of(e.sum * d.s), e.g);
      EXPECT_EQ(bits_of(d.k1), e.k1);
      EXPECT_EQ(bits_of(d.k2), e.k2);
      *x.grad.data<float>() = e.sum;
      run(update, kAdam,
          {.s = d.s, .k1 = d.k1, .k2 = d.k2, .lr = 1e-3f, .wd = 0.1f, .t = uint32_t(state.t)},
          x.args(runs));
      EXPECT_EQ(bits_of(*x.exp_avg.data<float>()), e.m);
      EXPECT_EQ(bits_of(*x.exp_avg_sq.data<float>()), e.v);
      EXPECT_EQ(bits_of(*x.master.data<float>()), e.p);
      EXPECT_EQ(x.weight.data<bf16>()->bits, bf16::encode(*x.master.data<float>()));
    }
  }
}

// Zeros, subnormals, huge values and ordinary ones of all exponents.
float hard_value(uint64_t i, uint32_t what) {
  const uint32_t w = random_word(i, what);
  switch (w & 7) {
    case 0:
      return 0.0f;
    case 1:
      return std::bit_cast<float>(w & 0x807FFFFFu);
    case 2:
      return std::bit_cast<float>((w & 0x807FFFFFu) | 0x7E800000u);
    case 3:
      return std::bit_cast<float>(w & 0xBFFFFFFFu);
    default:
      return normal_from_word(w);
  }
}

void store(const Tensor& x, int64_t i, float value) {
  if (x.view().dtype() == DType::kFloat32) {
    x.data<float>()[i] = value;
  } else {
    x.data<bf16>()[i] = bf16(value);
  }
}

void fill(State& x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    x.grad.data<float>()[i] = hard_value(i, 1);
    x.master.data<float>()[i] = hard_value(i, 2);
    store(x.exp_avg, i, hard_value(i, 3));
    store(x.exp_avg_sq, i, std::fabs(hard_value(i, 4)));
    store(x.weight, i, 7.0f);
  }
}

class AdamWTypes : public ::testing::TestWithParam<std::pair<DType, DType>> {};

TEST_P(AdamWTypes, FastEqualsReference) {
  const auto [moments, weights] = GetParam();
  const int64_t n = 200003;
  // Runs that begin and end anywhere, with gaps, at logical indices of every residue.
  const std::vector<ElementRun> runs{
      {.begin = 0, .end = 1, .logical = 5, .tensor_id = 11, .decay = false},
      {.begin = 1, .end = 140000, .logical = 3, .tensor_id = 12},
      {.begin = 140100, .end = 141000, .logical = (int64_t{1} << 34) + 2, .tensor_id = 13},
      {.begin = 141007, .end = 200001, .logical = 0, .tensor_id = 14, .decay = false}};
  State reference(n, moments, weights), fast(n, moments, weights);
  fill(reference, n);
  fast.copy_from(reference);
  State before(n, moments, weights);
  before.copy_from(reference);
  for (uint32_t t = 1; t <= 3; ++t) {
    const AdamWStep step{.s = 0.37f,
                         .k1 = 10.0f / float(t),
                         .k2 = 20.0f / float(t),
                         .lr = 1e-3f,
                         .wd = 0.1f,
                         .t = t};
    run(adamw_reference, kAdam, step, reference.args(runs), 99);
    run(adamw, kAdam, step, fast.args(runs), 99);
    EXPECT_EQ(fast.difference(reference), "") << "step " << t;
  }
  EXPECT_NE(fast.difference(before), "");
  for (const int64_t gap : {140000, 140099, 141003, 200001, 200002}) {
    EXPECT_EQ(bits_of(fast.master.data<float>()[gap]), bits_of(before.master.data<float>()[gap]));
  }
}

TEST_P(AdamWTypes, DoesNotDependOnHowASegmentIsCut) {
  const auto [moments, weights] = GetParam();
  const int64_t n = 1000;
  State whole(n, moments, weights), parts(n, moments, weights);
  fill(whole, n);
  parts.copy_from(whole);
  const AdamWStep step{.s = 1, .k1 = 2, .k2 = 3, .lr = 1e-2f, .wd = 0.1f, .t = 4};
  const std::vector<ElementRun> all{{.begin = 0, .end = n, .logical = 40, .tensor_id = 3}};
  run(adamw, kAdam, step, whole.args(all));
  for (const auto& [begin, end] :
       {std::pair{0, 1}, std::pair{1, 6}, std::pair{6, 333}, std::pair{333, 1000}}) {
    const std::vector<ElementRun> runs{
        {.begin = begin, .end = end, .logical = 40 + begin, .tensor_id = 3}};
    run(adamw, kAdam, step, parts.args(runs));
  }
  EXPECT_EQ(parts.difference(whole), "");
}

INSTANTIATE_TEST_SUITE_P(Storage, AdamWTypes,
                         ::testing::Values(std::pair{DType::kFloat32, DType::kFloat32},
                                           std::pair{DType::kFloat32, DType::kBFloat16},
                                           std::pair{DType::kBFloat16, DType::kFloat32},
                                           std::pair{DType::kBFloat16, DType::kBFloat16}),
                         [](const auto& info) {
                           return std::string("moments_") + name(info.param.first) + "_weights_" +
                                  name(info.param.second);
                         });

// The textbook's algorithm in double, written independently.
TEST(AdamW, HundredStepsAgainstDouble) {
  const int64_t n = 500;
  State x(n, DType::kFloat32, DType::kFloat32);
  std::vector<double> p(n), m(n), v(n);
  for (int64_t i = 0; i < n; ++i) {
    x.master.data<float>()[i] = normal_from_word(random_word(i, 5));
    p[i] = x.master.data<float>()[i];
  }
  const double lr = 1e-3, wd = 0.1;
  const std::vector<ElementRun> runs{{.begin = 0, .end = n}};
  StepState state;
  for (int t = 1; t <= 100; ++t) {
    for (int64_t i = 0; i < n; ++i) {
      const float g = normal_from_word(random_word(i + 1000 * t, 6)) + 0.3f;
      x.grad.data<float>()[i] = g;
      m[i] = 0.9 * m[i] + 0.1 * g;
      v[i] = 0.95 * v[i] + 0.05 * g * g;
      const double m_hat = m[i] / (1 - std::pow(0.9, t));
      const double v_hat = v[i] / (1 - std::pow(0.95, t));
      p[i] -= lr * wd * p[i];
      p[i] -= lr * m_hat / (std::sqrt(v_hat) + 1e-8);
    }
    const StepDecision d =
        decide({.beta1 = 0.9, .beta2 = 0.95}, 0, {.sumsq = 1, .tokens = 1}, state);
    run(adamw, kAdam,
        {.s = d.s, .k1 = d.k1, .k2 = d.k2, .lr = float(lr), .wd = float(wd), .t = uint32_t(t)},
        x.args(runs));
  }
  for (int64_t i = 0; i < n; ++i) {
    ASSERT_NEAR(x.master.data<float>()[i], p[i], 1e-6 * std::max(1.0, std::fabs(p[i]))) << i;
  }
}

// Segments of one table, as bf16 gradients and as what they are in fp32; and a step that is
// skipped.
TEST(AdamW, TakesAllSegmentsAndBf16Gradients) {
  const std::vector<int64_t> sizes{300, 0, 5000};
  const std::vector<ElementRun> small{{.begin = 7, .end = 299, .logical = 1, .tensor_id = 1}},
      large{{.begin = 0, .end = 1025, .tensor_id = 2},
            {.begin = 2000, .end = 5000, .tensor_id = 3, .decay = false}};
  const std::vector<std::vector<ElementRun>> runs{small, {}, large};
  std::vector<State> wide, narrow;
  std::vector<Tensor> grads;
  std::vector<AdamWArgs> args;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const int64_t n = sizes[i];
    wide.emplace_back(n, DType::kBFloat16, DType::kBFloat16);
    narrow.emplace_back(n, DType::kBFloat16, DType::kBFloat16);
    grads.emplace_back(DType::kBFloat16, std::initializer_list<int64_t>{n});
    fill(wide[i], n);
    for (int64_t k = 0; k < n; ++k) {
      grads[i].data<bf16>()[k] = bf16(wide[i].grad.data<float>()[k]);
      wide[i].grad.data<float>()[k] = grads[i].data<bf16>()[k];
    }
    narrow[i].copy_from(wide[i]);
    args.push_back(narrow[i].args(runs[i]));
    args.back().grad = grads[i];
  }
  AdamWStep step{.s = 0.5f, .k1 = 2, .k2 = 3, .lr = 1e-2f, .wd = 0.1f, .t = 4, .skip = 1};
  const TensorView bytes(&step, DType::kUInt8, {sizeof step});
  const auto expect_all_equal = [&](const char* what) {
    for (size_t i = 0; i < sizes.size(); ++i) EXPECT_EQ(narrow[i].difference(wide[i]), "") << what;
  };
  for (const Update update : {adamw, adamw_reference}) {
    step.skip = 1;
    update(kAdam, 9, bytes, {args, Device{}}, Stream());
    expect_all_equal("skipped");
    step.skip = 0;
    update(kAdam, 9, bytes, {args, Device{}}, Stream());
    EXPECT_NE(narrow[0].difference(wide[0]), "");
    for (size_t i = 0; i < sizes.size(); ++i) {
      run(adamw_reference, kAdam, step, wide[i].args(runs[i]), 9);
    }
    expect_all_equal("applied");
  }
}

TEST(AdamW, UnusedElementsOnlyDecay) {
  State x(2, DType::kFloat32, DType::kFloat32);
  x.master.data<float>()[0] = 2.0f;
  const std::vector<ElementRun> runs{{.begin = 0, .end = 2}};
  run(adamw, kAdam, {.s = 1, .k1 = 10, .k2 = 20, .lr = 0.5, .wd = 0.5}, x.args(runs));
  EXPECT_EQ(x.master.data<float>()[0], 1.5f);
  EXPECT_EQ(bits_of(x.master.data<float>()[1]), 0u);
}

TEST(AdamW, Bf16MomentsAreUnbiased) {
  const int64_t n = 10000;
  State x(n, DType::kBFloat16, DType::kFloat32);
  const float g = 1.2345f;
  for (int64_t i = 0; i < n; ++i) x.grad.data<float>()[i] = g;
  const std::vector<ElementRun> runs{{.begin = 0, .end = n, .tensor_id = 77}};
  run(adamw, kAdam, {.s = 1, .k1 = 10, .k2 = 20, .lr = 1e-3f, .t = 1}, x.args(runs), 5);
  const auto check = [&](const Tensor& moments, float exact) {
    const float down = bf16::from_bits(bits_of(exact) >> 16);
    const float up = bf16::from_bits((bits_of(exact) >> 16) + 1);
    double sum = 0;
    int64_t ups = 0;
    for (int64_t i = 0; i < n; ++i) {
      const float stored = moments.data<bf16>()[i];
      ASSERT_TRUE(stored == down || stored == up);
      sum += stored;
      ups += stored == up;
    }
    const double fraction = (exact - down) / (up - down);
    const double sigma = (up - down) * std::sqrt(fraction * (1 - fraction) / n);
    EXPECT_NEAR(sum / n, exact, 4 * sigma);
    EXPECT_GT(ups, 0);
    EXPECT_LT(ups, n);
  };
  check(x.exp_avg, static_cast<float>(1 - 0.9) * g);
  check(x.exp_avg_sq, (static_cast<float>(1 - 0.95) * g) * g);
}

TEST(AdamW, MomentRandomNumbersAreTheDomainsOwn) {  // one element, by hand from the definition
  State x(1, DType::kBFloat16, DType::kFloat32);
  *x.grad.data<float>() = 1.2345f;
  const int64_t logical = (int64_t{3} << 33) + 6;
  const std::vector<ElementRun> runs{
      {.begin = 0, .end = 1, .logical = logical, .tensor_id = tensor_id("a.weight")}};
  run(adamw, kAdam, {.s = 1, .k1 = 1, .k2 = 1, .t = 9}, x.args(runs), 0x0123456789ABCDEFull);
  const uint64_t block = logical / 4;
  const PhiloxKey key{0x89ABCDEFu, 0x01234567u ^ (2 * 0x9E3779B9u)};
  const auto word = [&](uint32_t which) {
    return philox(
        key, {uint32_t(block), uint32_t(block >> 32), tensor_id("a.weight"), 2 * 9 + which})[2];
  };
  const float m = static_cast<float>(1 - 0.9) * 1.2345f;
  const float v = (static_cast<float>(1 - 0.95) * 1.2345f) * 1.2345f;
  EXPECT_EQ(x.exp_avg.data<bf16>()->bits, (bits_of(m) + (word(0) & 0xFFFF)) >> 16);
  EXPECT_EQ(x.exp_avg_sq.data<bf16>()->bits, (bits_of(v) + (word(1) & 0xFFFF)) >> 16);
}

TEST(AdamW, RefusesWhatDoesNotFit) {
  State x(4, DType::kFloat32, DType::kFloat32), y(5, DType::kBFloat16, DType::kFloat32);
  AdamWArgs args = x.args({});
  EXPECT_THROW(run(adamw, {.eps = 0}, {}, args), Error);
  args.master = y.master;
  EXPECT_THROW(run(adamw, kAdam, {}, args), Error);
  args = x.args({});
  args.exp_avg = y.exp_avg.view().slice(0, 0, 4);
  EXPECT_THROW(run(adamw, kAdam, {}, args), Error);
  const std::vector<ElementRun> outside{{.begin = 2, .end = 5}};
  EXPECT_THROW(run(adamw, kAdam, {}, x.args(outside)), Error);
}

}  // namespace
}  // namespace moiety::optim
