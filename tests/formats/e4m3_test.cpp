#include "moiety/formats/e4m3.h"

#include <gtest/gtest.h>

#include "tests/formats/codec_testing.h"

namespace moiety::testing {
namespace {

const Grid kGrid = Grid::make(3, 7, 0x7E, 0x80, 0x7F);

TEST(E4M3, CodesRoundTrip) {
  expect_codes_round_trip<E4M3>(kGrid);
  EXPECT_EQ(bits_of(E4M3::decode(0x7F)), 0x7FFFFFFFu);
  EXPECT_EQ(bits_of(E4M3::decode(0xFF)), 0x7FFFFFFFu);
}

TEST(E4M3, RoundsToNearestEven) {
  static_assert(E4M3::encode(1.0f) == 0x38 && E4M3::decode(0x01) == 0x1p-9f);
  EXPECT_EQ(E4M3::encode(0x1p-10f), 0x00);
  EXPECT_EQ(E4M3::encode(0x1.000002p-10f), 0x01);
  EXPECT_EQ(E4M3::encode(432.0f), 0x7E);  // between 416 and 448, to even
  expect_encode_is_nearest<E4M3>(kGrid);
}

TEST(E4M3, SignsOfZeroAndSpecials) {
  EXPECT_EQ(E4M3::encode(-0.0f), 0x80);
  EXPECT_EQ(E4M3::encode(-1e-40f), 0x80);
  EXPECT_EQ(E4M3::encode(HUGE_VALF), 0x7E);
  EXPECT_EQ(E4M3::encode(-HUGE_VALF), 0xFE);
  EXPECT_EQ(E4M3::encode(from_bits(0xFFC00000u)), 0x7F);
  EXPECT_EQ(E4M3::encode_stochastic(from_bits(0xFF800001u), 255), 0x7F);
}

TEST(E4M3, Stochastic) {
  expect_values_stay<E4M3>(kGrid);
  expect_stochastic_is_largest_below<E4M3>(kGrid);
  expect_exact_probabilities<E4M3>(kGrid);
}

TEST(E4M3, FlushModeIsHarmless) { expect_flush_mode_is_harmless<E4M3>(kGrid); }

TEST(E4M3, DISABLED_AllPatterns) { expect_nearest_for_all_patterns<E4M3>(kGrid); }

}  // namespace
}  // namespace moiety::testing
