#include "moiety/quant/scale_math.h"

#include <cfloat>
#include <cmath>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/formats/bf16.h"
#include "moiety/formats/e5m2.h"
#include "moiety/quant/rounding.h"
#include "tests/support/bits.h"

namespace moiety::quant {
namespace {

constexpr float kInf = HUGE_VALF;
float from_bits(uint32_t bits) { return std::bit_cast<float>(bits); }
// Non-finite amax of both kinds, whatever the payload.
const float kNonFinite[] = {kInf, from_bits(0x7F800001u), from_bits(0x7FC00000u),
                            from_bits(0x7FFFFFFFu)};

// Magnitudes of every binade, ties of nothing in particular, and the ends.
std::vector<float> magnitudes(int count) {
  std::vector<float> out = {0, from_bits(1), from_bits(0x007FFFFFu), FLT_MIN, 1, FLT_MAX};
  std::mt19937 random(11);
  while (static_cast<int>(out.size()) < count) out.push_back(from_bits(random() % 0x7F800000u));
  return out;
}

// RN in FP32 of a quotient, a product: exact or correctly rounded in double, then once more. Double
// has more than twice the digits of FP32, so the second rounding does no harm.
float quotient(float a, float b) {
  return static_cast<float>(static_cast<double>(a) / static_cast<double>(b));
}
float product(float a, float b) {
  return static_cast<float>(static_cast<double>(a) * static_cast<double>(b));
}

TEST(Fp8Scale, AgreesWithDouble) {
  for (float fp8_max : {E4M3::kMax, E5M2::kMax}) {
    for (float amax : magnitudes(100000)) {
      const float want = amax == 0 ? 1.0f : std::fmin(quotient(fp8_max, amax), FLT_MAX);
      const Fp8Scale got = fp8_scale(amax, fp8_max, 0, false);
      ASSERT_EQ(got.encode, want) << amax;
      ASSERT_EQ(got.decode, quotient(1, want)) << amax;
      const Fp8Scale pow2 = fp8_scale(amax, fp8_max, 0, true);
      int exponent;
      std::frexp(want, &exponent);
      ASSERT_EQ(pow2.encode, std::ldexp(1.0f, exponent - 1)) << amax;
      ASSERT_EQ(pow2.decode, std::ldexp(1.0f, 1 - exponent)) << amax;
    }
  }
}

TEST(Fp8Scale, Values) {
  EXPECT_EQ(fp8_scale(448, 448, 0, false).encode, 1);
  EXPECT_EQ(fp8_scale(3, 448, 0, true).encode, 128);
  EXPECT_EQ(fp8_scale(3, 448, 0, true).decode, 1.0f / 128);
  EXPECT_EQ(fp8_scale(0, 448, 0, true).decode, 1);
  EXPECT_EQ(fp8_scale(0, 448, 7, false).encode, 64);
  EXPECT_EQ(fp8_scale(14, 448, 7, false).encode, 32);
  EXPECT_EQ(fp8_scale(from_bits(1), 448, 0, false).encode, FLT_MAX);
  EXPECT_EQ(fp8_scale(from_bits(1), 448, 0, true).encode, 0x1p127f);
  EXPECT_EQ(bits_of(fp8_scale(from_bits(1), 448, 0, true).decode), 0x00400000u);
}

TEST(Fp8Scale, NonFiniteAmaxGivesNan) {
  for (float amax : kNonFinite) {
    for (bool pow2 : {false, true}) {
      const Fp8Scale scale = fp8_scale(amax, 448, 1, pow2);
      EXPECT_EQ(bits_of(scale.encode), 0x7FFFFFFFu);
      EXPECT_EQ(bits_of(scale.decode), 0x7FFFFFFFu);
      for (float x : {0.0f, -1.0f, -kInf, amax}) EXPECT_EQ(E4M3::encode(x * scale.encode), 0x7F);
      EXPECT_EQ(E5M2::encode(-2 * scale.encode), 0x7F);
    }
  }
  EXPECT_EQ(bits_of(fp8_scale_of(from_bits(0xFFC00001u)).decode), 0x7FFFFFFFu);
}

TEST(Mxfp8Scale, Golden) {
  EXPECT_EQ(bits_of(1.0f / E4M3::kMax), 0x3B124925u);
  EXPECT_EQ(bits_of(1.0f / E5M2::kMax), 0x37924925u);
  const std::pair<float, int> cases[] = {{448, 127},   {449, 128}, {447, 127},
                                         {224, 126},   {6, 121},   {1, 119},
                                         {1e-30f, 19}, {0, 0},     {FLT_MAX, 247}};
  for (const auto& [amax, e] : cases) EXPECT_EQ(mxfp8_scale<E4M3>(amax), e) << amax;
  for (float amax : kNonFinite) {
    EXPECT_EQ(mxfp8_scale<E4M3>(amax), 0xFF);
    EXPECT_EQ(mxfp8_scale<E5M2>(amax), 0xFF);
  }
  EXPECT_EQ(E4M3::encode(3.0f * UE8M0::inverse(0xFF)), 0x7F);
}

// The ends are those at which docs/numerics.md says that operands stop being exact in bf16.
TEST(Mxfp8Scale, EndsOfTheExactRange) {
  const auto after = [](float x) { return std::nextafter(x, kInf); };
  EXPECT_EQ(mxfp8_scale<E4M3>(448 * 0x1p-125f), 2);
  EXPECT_EQ(mxfp8_scale<E4M3>(after(448 * 0x1p-125f)), 3);
  EXPECT_EQ(mxfp8_scale<E5M2>(57344 * 0x1p-118f), 9);
  EXPECT_EQ(mxfp8_scale<E5M2>(after(57344 * 0x1p-118f)), 10);
  EXPECT_EQ(mxfp8_scale<E4M3>(448 * 0x1p119f), 246);
  EXPECT_EQ(mxfp8_scale<E4M3>(after(448 * 0x1p119f)), 247);
  EXPECT_EQ(mxfp8_scale<E5M2>(57344 * 0x1p112f), 239);
  EXPECT_EQ(mxfp8_scale<E5M2>(after(57344 * 0x1p112f)), 240);
}

// Checks that e is non-decreasing and that the scaled amax exceeds the largest code by rounding
// alone; amax ascending.
template <class F>
struct Mxfp8Bounds {
  uint8_t last = 0;
  float largest = 0;
  bool monotone = true;

  void add(float amax) {
    const uint8_t e = mxfp8_scale<F>(amax);
    monotone = monotone && e >= last;
    last = e;
    largest = std::fmax(largest, amax * UE8M0::inverse(e));
  }
  void expect(float bound, int last_e) const {
    EXPECT_TRUE(monotone);
    EXPECT_LE(largest, bound);
    EXPECT_EQ(last, last_e);
  }
};

template <class F>
void expect_mxfp8_bounds(uint32_t step, float bound, int last_e) {
  Mxfp8Bounds<F> bounds;
  for (uint64_t b = 0; b < 0x7F7FFFFF; b += step) bounds.add(from_bits(static_cast<uint32_t>(b)));
  bounds.add(FLT_MAX);
  bounds.expect(bound, last_e);
  // Beside the largest value of each e, where rounding decides.
  for (int k = -149; k < 120; ++k) {
    const float edge = std::ldexp(F::kMax, k);
    if (std::isinf(edge)) break;
    Mxfp8Bounds<F> near_edge;
    for (int64_t d = -8; d <= 8; ++d) {
      const int64_t b = static_cast<int64_t>(bits_of(edge)) + d;
      if (b >= 0) near_edge.add(from_bits(static_cast<uint32_t>(b)));
    }
    near_edge.expect(bound, near_edge.last);
  }
}

TEST(Mxfp8Scale, MonotoneAndBounded) {
  expect_mxfp8_bounds<E4M3>(4099, 448.00004f, 247);
  expect_mxfp8_bounds<E5M2>(4099, 57344.004f, 240);
}

TEST(Mxfp8Scale, DISABLED_AllPatterns) {
  expect_mxfp8_bounds<E4M3>(1, 448.00004f, 247);
  expect_mxfp8_bounds<E5M2>(1, 57344.004f, 240);
}

Nvfp4BlockScale block_scale(float tensor_amax, float block_amax) {
  return nvfp4_block_scale(block_amax, nvfp4_tensor_scale(tensor_amax));
}

TEST(Nvfp4Scale, Golden) {
  EXPECT_EQ(block_scale(1, 1).code, 0x7E);
  EXPECT_EQ(block_scale(1, .5f).code, 0x76);
  EXPECT_EQ(block_scale(4, 1).code, 0x6E);
  EXPECT_EQ(block_scale(10, .001f).code, 0x13);
  EXPECT_EQ(block_scale(10, 1e-5f).code, 0x00);
  EXPECT_EQ(block_scale(100, 3).code, 0x55);
  EXPECT_EQ(bits_of(block_scale(100, 3).encode), 0x40045512u);
  // S saturates.
  EXPECT_EQ(nvfp4_tensor_scale(1e-37f).encode, FLT_MAX);
  EXPECT_EQ(bits_of(nvfp4_tensor_scale(1e-37f).decode), 0x00200000u);
}

TEST(Nvfp4Scale, AgreesWithDouble) {
  const float sixth = from_bits(0x3E2AAAABu);
  std::mt19937 random(12);
  for (float amax : magnitudes(100000)) {
    const float s = amax == 0 ? 1.0f : std::fmin(quotient(2688, amax), FLT_MAX);
    const Nvfp4TensorScale tensor = nvfp4_tensor_scale(amax);
    ASSERT_EQ(tensor.encode, s) << amax;
    ASSERT_EQ(tensor.decode, quotient(1, s)) << amax;
    // Block maxima mostly below the tensor's, some above it as a given amax may have them.
    const float b = std::ldexp(amax, 2 - static_cast<int>(random() % 24)) *
                    (1 + static_cast<float>(random() % 1000) / 1000);
    if (std::isinf(b)) continue;
    const uint8_t code = E4M3::encode(std::fmin(product(b, product(s, sixth)), FLT_MAX));
    const float divisor = product(E4M3::decode(code), tensor.decode);
    const Nvfp4BlockScale block = nvfp4_block_scale(b, tensor);
    ASSERT_EQ(block.code, code) << amax << ' ' << b;
    ASSERT_EQ(block.encode, divisor == 0 ? FLT_MAX : std::fmin(quotient(1, divisor), FLT_MAX));
  }
}

TEST(Nvfp4Scale, ZeroBlocks) {
  for (float tensor_amax : {0.0f, 1.0f, FLT_MAX}) {
    const Nvfp4BlockScale zero = block_scale(tensor_amax, 0);
    EXPECT_EQ(zero.code, 0);
    EXPECT_EQ(zero.encode, FLT_MAX);
    EXPECT_EQ(E2M1::encode(0.0f * zero.encode), 0);
    EXPECT_EQ(E2M1::encode(-0.0f * zero.encode), 8);
  }
  EXPECT_EQ(nvfp4_tensor_scale(0).encode, 1);
  EXPECT_EQ(nvfp4_tensor_scale(0).decode, 1);
}

TEST(Nvfp4Scale, NonFiniteAmaxGivesNan) {
  for (float bad : kNonFinite) {
    const Nvfp4TensorScale tensor = nvfp4_tensor_scale(bad);
    EXPECT_EQ(bits_of(tensor.decode), 0x7FFFFFFFu);
    for (const Nvfp4BlockScale& block :
         {nvfp4_block_scale(1, tensor), nvfp4_block_scale(0, tensor),
          nvfp4_block_scale(bad, tensor), block_scale(1, bad), block_scale(0, bad)}) {
      EXPECT_EQ(block.code, 0x7F);
      EXPECT_EQ(bits_of(block.encode), 0x7FFFFFFFu);
      for (float x : {0.0f, -0.0f, -1.0f, bad}) EXPECT_EQ(E2M1::encode(x * block.encode), 0x7);
    }
  }
}

// The block x_i = i - 7.5 of docs/spec/formats.md#goldens.
struct GoldenBlock {
  float x[16];
  GoldenBlock() {
    for (int i = 0; i < 16; ++i) x[i] = static_cast<float>(i) - 7.5f;
  }
};

template <class Encode>
std::vector<int> packed(Encode&& encode) {
  std::vector<int> out;
  for (int i = 0; i < 16; i += 2) out.push_back(E2M1::pack(encode(i), encode(i + 1)));
  return out;
}

TEST(GoldenBlock, Nvfp4) {
  const GoldenBlock block;
  const Nvfp4TensorScale tensor = nvfp4_tensor_scale(7.5f);
  EXPECT_EQ(bits_of(tensor.encode), 0x43B33333u);
  EXPECT_EQ(bits_of(tensor.decode), 0x3B36DB6Eu);
  const Nvfp4BlockScale scale = nvfp4_block_scale(7.5f, tensor);
  EXPECT_EQ(scale.code, 0x7E);
  EXPECT_EQ(bits_of(scale.encode), 0x3F4CCCCDu);
  EXPECT_EQ(packed([&](int i) { return E2M1::encode(block.x[i] * scale.encode); }),
            (std::vector<int>{0xFF, 0xEE, 0xCD, 0x9A, 0x21, 0x54, 0x66, 0x77}));
  const PhiloxBlock random = RandomStream::make({0x0123456789ABCDEFull, 3}, 7, 0, false).block(0);
  EXPECT_EQ(packed([&](int i) {
              return E2M1::encode_stochastic(block.x[i] * scale.encode, random_byte(random, i));
            }),
            (std::vector<int>{0xEF, 0xEE, 0xCD, 0x9B, 0x31, 0x54, 0x66, 0x76}));
}

TEST(GoldenBlock, Mxfp8) {
  const GoldenBlock block;
  const uint8_t e = mxfp8_scale<E4M3>(7.5f);
  EXPECT_EQ(e, 122);
  const int want[16] = {0xF7, 0xF5, 0xF3, 0xF1, 0xEE, 0xEA, 0xE4, 0xD8,
                        0x58, 0x64, 0x6A, 0x6E, 0x71, 0x73, 0x75, 0x77};
  for (int i = 0; i < 16; ++i) {
    EXPECT_EQ(E4M3::encode(block.x[i] * UE8M0::inverse(e)), want[i]) << i;
  }
}

}  // namespace
}  // namespace moiety::quant
