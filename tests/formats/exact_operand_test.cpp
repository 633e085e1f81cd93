// The products of a code and its block scale that are exact in bf16 (docs/numerics.md,
// Low-precision formats): all codes x all scales.
#include <cmath>
#include <set>

#include <gtest/gtest.h>

#include "moiety/formats/bf16.h"
#include "moiety/formats/e2m1.h"
#include "moiety/formats/e4m3.h"
#include "moiety/formats/e5m2.h"
#include "moiety/formats/fp16.h"
#include "moiety/formats/ue8m0.h"

namespace moiety {
namespace {

struct Range {
  int first, last;  // codes of scales
};

bool exact(double product) {
  const float rounded = bf16(static_cast<float>(product));
  return rounded == product;
}
bool normal_or_zero(double product) { return product == 0 || std::fabs(product) >= 0x1p-126; }

// Expects that with scale code e every product is exact just when e lies in `exactly`, and free of
// subnormals just from `normal_from` on. The product in FP32 is always exact, except for overflow.
template <class F>
void expect_ranges(Range exactly, int normal_from) {
  for (int e = 0; e <= UE8M0::kMaxCode; ++e) {
    const double scale = UE8M0::decode(static_cast<uint8_t>(e));
    bool all_exact = true, all_normal = true;
    for (int code = 0; code <= F::kMaxCode; ++code) {
      for (double sign : {1.0, -1.0}) {
        const double value = F::decode(static_cast<uint8_t>(code));
        ASSERT_EQ(value, F::decode(static_cast<uint8_t>(code | 0x80)) * -1.0);
        const double product = sign * value * scale;
        const float single = static_cast<float>(product);
        ASSERT_TRUE(single == product || std::isinf(single));
        all_exact = all_exact && exact(product);
        all_normal = all_normal && normal_or_zero(product);
      }
    }
    EXPECT_EQ(all_exact, e >= exactly.first && e <= exactly.last) << e;
    EXPECT_EQ(all_normal, e >= normal_from) << e;
  }
}

TEST(ExactOperand, Mxfp8E4M3) { expect_ranges<E4M3>({3, 246}, 10); }
TEST(ExactOperand, Mxfp8E5M2) { expect_ranges<E5M2>({10, 239}, 17); }

TEST(ExactOperand, Fp8Codes) {
  for (int code = 0; code < 256; ++code) {
    const auto byte = static_cast<uint8_t>(code);
    const int magnitude = code & 0x7F;
    EXPECT_TRUE(magnitude > E4M3::kMaxCode || exact(E4M3::decode(byte))) << code;
    EXPECT_TRUE(magnitude > E5M2::kMaxCode || exact(E5M2::decode(byte))) << code;
  }
}

TEST(ExactOperand, Nvfp4) {
  std::set<double> magnitudes;
  for (int q = 0; q < 16; ++q) {
    for (int s = 0; s < 256; ++s) {
      if ((s & 0x7F) > E4M3::kMaxCode) continue;
      const double product = static_cast<double>(E2M1::decode(static_cast<uint8_t>(q))) *
                             static_cast<double>(E4M3::decode(static_cast<uint8_t>(s)));
      ASSERT_TRUE(exact(product)) << q << ' ' << s;
      ASSERT_EQ(static_cast<float>(fp16(static_cast<float>(product))), product);
      int exponent;
      const double fraction = std::frexp(std::fabs(product), &exponent);
      ASSERT_EQ(std::ldexp(fraction, 6), std::floor(std::ldexp(fraction, 6))) << "6 bits";
      magnitudes.insert(std::fabs(product));
    }
  }
  EXPECT_EQ(*magnitudes.begin(), 0);
  EXPECT_EQ(*std::next(magnitudes.begin()), 0x1p-10);
  EXPECT_EQ(*magnitudes.rbegin(), 2688);
  // Products of two operands are exact in FP32, so only the order of their sum can matter.
  for (double a : magnitudes) {
    for (double b : magnitudes) ASSERT_EQ(static_cast<float>(a * b), a * b);
  }
}

}  // namespace
}  // namespace moiety
