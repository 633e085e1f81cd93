#include "moiety/formats/fp32.h"

#include <limits>

#include <gtest/gtest.h>

#include "tests/support/bits.h"

namespace moiety {
namespace {

TEST(Fp32, BitsOfMagnitudesOrderThem) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float ascending[] = {0.0f, 0x1p-149f, 0x1p-126f, 1.0f, kMaxFloat, kInfinity, kCanonicalNan};
  for (size_t i = 1; i < std::size(ascending); ++i) {
    EXPECT_LT(abs_bits(ascending[i - 1]), abs_bits(ascending[i])) << i;
    EXPECT_LT(abs_bits(-ascending[i - 1]), abs_bits(ascending[i])) << i;
  }
  EXPECT_EQ(abs_bits(-0.0f), 0u);
  EXPECT_EQ(kMaxFloat, std::numeric_limits<float>::max());
}

TEST(Fp32, EveryNanIsWrittenAsOne) {
  for (const uint32_t bits : {0x7F800001u, 0x7FC00000u, 0xFF800001u, 0xFFFFFFFFu}) {
    const float x = std::bit_cast<float>(bits);
    EXPECT_TRUE(is_nan(x));
    EXPECT_FALSE(is_finite(x));
    EXPECT_EQ(bits_of(canonical(x)), 0x7FFFFFFFu);
  }
  EXPECT_FALSE(is_finite(-std::numeric_limits<float>::infinity()));
  EXPECT_TRUE(is_finite(-kMaxFloat));
  EXPECT_EQ(bits_of(canonical(-0.0f)), 0x80000000u);
}

}  // namespace
}  // namespace moiety
