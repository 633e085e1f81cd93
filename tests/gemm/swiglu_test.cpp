// Activations: golden values, every bf16 input, fast path against reference bit for bit, and the
// gradients against finite differences in double.
#include "moiety/gemm/swiglu.h"

#include "moiety/base/parallel.h"
#include "tests/gemm/swiglu_cases.h"
#include "tests/quant/amax_of.h"
#include "tests/support/bits.h"

namespace moiety::gemm {
namespace {

// a and b in one row; returns {y in fp32, A, dHa, dHb}, the last three in bf16, p 0.6, dA 0.25.
std::vector<uint32_t> golden(Activation activation, float a, float b) {
  ActivationProblem exact(activation, DType::kFloat32, 1, 1, 0),
      p(activation, DType::kBFloat16, 1, 1, 0);
  for (const ActivationProblem* q : {&exact, &p}) {
    put(q->h, 0, a);
    put(q->h, 1, b);
    put(q->prob, 0, 0.6f);
    put(q->da, 0, 0.25);
  }
  exact.args.prob_R = {};
  exact.forward();
  p.forward();
  const uint16_t forward_a = p.a.data<bf16>()->bits;
  p.backward();
  EXPECT_EQ(p.a.data<bf16>()->bits, forward_a);
  return {bits_of(exact.a.data<float>()[0]), forward_a, p.dh.data<bf16>()[0].bits,
          p.dh.data<bf16>()[1].bits};
}

TEST(Activation, GoldenValues) {
  const Activation quick{ActivationKind::kGlu, 1.702f, 7, 1};
  using Bits = std::vector<uint32_t>;
  EXPECT_EQ(golden(swiglu(), 1.5f, -0.75f), (Bits{0xBF6B7620, 0xBF0D, 0xBDF0, 0x3E3C}));
  EXPECT_EQ(golden(quick, 1.5f, -0.75f), (Bits{0x3EB221FD, 0x3E56, 0x3D29, 0x3E56}));
  const Bits edge = golden(quick, 7, -7), past = golden(quick, 8, -9);
  EXPECT_EQ(Bits(edge.begin() + 1, edge.end()), (Bits{0xC1CA, 0xBF66, 0x3F86}));
  EXPECT_EQ(Bits(past.begin() + 1, past.end()), (Bits{0xC1CA, 0x0000, 0x0000}));
}

TEST(Activation, SigmoidGoldens) {
  const std::pair<float, uint32_t> goldens[] = {{1, 0x3F3B26A8},   {-1, 0x3E89B2B1},
                                                {10, 0x3F7FFD06},  {-10, 0x383E6997},
                                                {-87, 0x00B33687}, {-87.1f, 0}};
  for (const auto& [x, bits] : goldens) EXPECT_EQ(bits_of(sigmoid(x)), bits) << x;
}

TEST(Activation, EveryBf16IsRoundedCorrectly) {
  ActivationProblem p(swiglu(), DType::kBFloat16, 1, 65536, 0);
  p.args.prob_R = {};
  for (int64_t i = 0; i < 65536; ++i) {
    p.h.data<bf16>()[i] = bf16::from_bits(static_cast<uint16_t>(i));
    put(p.h, 65536 + i, 1);
  }
  p.forward();
  int64_t checked = 0;
  for (int64_t i = 0; i < 65536; ++i) {
    const double x = get(p.h, i);
    if (!(std::fabs(x) < 87)) continue;
    const double y = x / (1 + std::exp(-x)), got = get(p.a, i);
    ++checked;
    if (got == 0) {
      ASSERT_LE(std::fabs(y), 0x1p-134) << x;
      continue;
    }
    const uint16_t bits = p.a.data<bf16>()[i].bits;
    for (int step : {-1, 1}) {  // no neighbour is nearer
      const double neighbour = bf16::from_bits(static_cast<uint16_t>(bits + step));
      ASSERT_LE(std::fabs(got - y), std::fabs(neighbour - y)) << x;
    }
  }
  EXPECT_EQ(checked, 34140);
}

TEST(Activation, FastPathHasTheBitsOfTheReference) {
  for (const ActivationCase& kind : kActivationKinds) {
    for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (auto [ffn, interleave] : kActivationColumns) {
        SCOPED_TRACE(text("{} {} F={} s={}", kind.name, name(dtype), ffn, interleave));
        ActivationProblem p(kind.activation, dtype, 5, ffn, interleave);
        p.put_specials();
        p.forward();
        const Tensor forward_a = copy_of(p.a);
        const std::vector<Tensor> expected = p.reference();
        p.backward();
        expect_same(p.a, forward_a, "A again");
        expect_same(p.a, expected[0], "A");
        expect_same(p.dh, expected[1], "dH");
        expect_same(p.dprob, expected[2], "dprob");
        activation_backward(p.args, p.da, p.h, {}, {}, Stream());  // dH in H's place
        expect_same(p.h, expected[1], "dH over H");
      }
    }
  }
}

TEST(Activation, DprobIsTheCanonicalDotOfDaAndY) {
  const ActivationProblem p(swiglu(), DType::kFloat32, 3, 130, 0);
  p.backward();
  for (int64_t r = 0; r < 3; ++r) {
    float dot = 0;
    for (int64_t s = 0; s < 130; s += 64) {
      float lane[4] = {};
      for (int64_t c = s; c < std::min<int64_t>(130, s + 64); ++c) {
        const float a = p.h.data<float>()[r * 260 + c], b = p.h.data<float>()[r * 260 + 130 + c];
        float& l = lane[(c - s) % 8 / 2];
        l = std::fma(p.da.data<float>()[r * 130 + c], a * sigmoid(a) * b, l);
      }
      dot += (lane[0] + lane[1]) + (lane[2] + lane[3]);
    }
    EXPECT_EQ(p.dprob.data<float>()[r], dot);
  }
}

TEST(Activation, InterleaveIsAPermutationOfColumns) {
  const int64_t ffn = 96, s = 24;
  const ActivationProblem plain(swiglu(), DType::kBFloat16, 4, ffn, 0),
      woven(swiglu(), DType::kBFloat16, 4, ffn, s);
  const auto column = [&](int64_t half, int64_t f) { return f / s * 2 * s + half * s + f % s; };
  for (int64_t r = 0; r < 4; ++r) {
    for (int64_t f = 0; f < ffn; ++f) {
      for (int64_t half : {0, 1}) {
        put(woven.h, r * 2 * ffn + column(half, f), get(plain.h, r, half * ffn + f));
      }
    }
  }
  plain.backward();
  woven.backward();
  EXPECT_TRUE(same_bits(plain.a, woven.a));
  EXPECT_TRUE(same_bits(plain.dprob, woven.dprob));
  for (int64_t r = 0; r < 4; ++r) {
    for (int64_t f = 0; f < ffn; ++f) {
      for (int64_t half : {0, 1}) {
        ASSERT_EQ(get(woven.dh, r, column(half, f)), get(plain.dh, r, half * ffn + f));
      }
    }
  }
}

TEST(Activation, DeadRowsAreNeitherReadNorWritten) {
  for (const GroupCase& c : group_cases()) {
    SCOPED_TRACE(c.name);
    const TestGroups groups(c);
    ActivationProblem p(swiglu(), DType::kBFloat16, groups.capacity(), 16, 0),
        all(swiglu(), DType::kBFloat16, groups.capacity(), 16, 0);
    all.backward();
    p.args.groups = groups();
    for (const Tensor* t : {&p.h, &p.da, &p.prob}) groups.fill_dead_rows(*t, NAN);
    for (const Tensor* t : {&p.a, &p.dh, &p.dprob}) fill(*t, kSentinel);
    p.forward();
    p.backward();
    const std::vector<int64_t> owner = groups.owners();
    const Tensor* pairs[][2] = {{&p.a, &all.a}, {&p.dh, &all.dh}, {&p.dprob, &all.dprob}};
    for (const auto& [mine, whole] : pairs) {
      const int64_t columns = groups.capacity() == 0 ? 0 : mine->view().numel() / groups.capacity();
      for (int64_t i = 0; i < mine->view().numel(); ++i) {
        ASSERT_EQ(get(*mine, i), owner[i / columns] < 0 ? kSentinel : get(*whole, i)) << i;
      }
    }
  }
}

// The amax of a group where there are groups (docs/spec/formats.md#amax-from-elsewhere).
TEST(Activation, SinkHasTheAmaxOfWhatIsStored) {
  const double specials[] = {0, 1e30, INFINITY, NAN};
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const GroupCase& c : group_cases()) {
      for (const double special : specials) {
        for (const bool grouped : {false, true}) {
          SCOPED_TRACE(text("{} {} {}", c.name, special, grouped));
          const TestGroups groups(c);
          const int64_t rows = groups.capacity();
          ActivationProblem p(swiglu(), dtype, rows, 24, 8);
          if (special == 0) fill(p.h, 0);
          if (rows > 0) put(p.h, (rows / 2) * 48 + 5, special);
          if (grouped) p.args.groups = groups();
          const Tensor amax =
              normal_tensor(DType::kFloat32, {grouped ? p.args.groups.experts : 1}, 9);
          p.args.sink = {amax};
          const ThreadBudget threads(3);
          p.forward();
          EXPECT_EQ(bits_of(amax), quant::amax_of(p.a, grouped ? &p.args.groups : nullptr));
          p.backward();
          EXPECT_EQ(bits_of(amax), quant::amax_of(p.dh, grouped ? &p.args.groups : nullptr));
        }
      }
    }
  }
}

TEST(Activation, GradientsMatchFiniteDifferences) {
  for (const ActivationCase& kind : kActivationKinds) {
    SCOPED_TRACE(kind.name);
    ActivationProblem p(kind.activation, DType::kFloat64, 3, 9, 0);
    p.backward();
    const auto loss = [&] {
      p.forward();
      double sum = 0;
      for (int64_t i = 0; i < p.a.view().numel(); ++i) sum += get(p.a, i) * get(p.da, i);
      return sum;
    };
    const auto check = [&](const Tensor& input, const Tensor& gradient) {
      constexpr double kStep = 1e-5;
      for (int64_t i = 0; i < input.view().numel(); ++i) {
        const double x = get(input, i);
        put(input, i, x + kStep);
        const double up = loss();
        put(input, i, x - kStep);
        const double down = loss();
        put(input, i, x);
        const double expected = (up - down) / (2 * kStep);
        ASSERT_NEAR(get(gradient, i), expected, 1e-6 * (1 + std::fabs(expected))) << i;
      }
    };
    check(p.h, p.dh);
    check(p.prob, p.dprob);
  }
}

TEST(Activation, ErrorsNameTheArgument) {
  ActivationProblem p(swiglu(), DType::kFloat32, 2, 24, 0);
  p.args.interleave = 16;
  EXPECT_THROW(p.forward(), Error);
  p.args.interleave = 4;
  EXPECT_THROW(p.forward(), Error);
  p.args.interleave = 8;
  EXPECT_NO_THROW(p.forward());
  EXPECT_THROW(activation_forward(p.args, p.a.view().slice(1, 0, 20), Stream()), Error);
  const Tensor amax(DType::kFloat32, {2});
  p.args.sink = {amax};
  EXPECT_THROW(p.forward(), Error);  // one value, without groups
  ActivationProblem exact(swiglu(), DType::kFloat64, 2, 24, 0);
  exact.args.sink = {amax.view().slice(0, 0, 1)};
  EXPECT_THROW(exact.forward(), Error);
}

}  // namespace
}  // namespace moiety::gemm
