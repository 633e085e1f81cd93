#include "moiety/formats/e2m1.h"

#include <gtest/gtest.h>

#include "tests/formats/codec_testing.h"

namespace moiety::testing {
namespace {

const Grid kGrid = Grid::make(1, 1, 7, 0x8, 0x7);

TEST(E2M1, CodesRoundTrip) {
  EXPECT_EQ(kGrid.values, (std::vector<double>{0, .5, 1, 1.5, 2, 3, 4, 6}));
  expect_codes_round_trip<E2M1>(kGrid);
}

TEST(E2M1, RoundsToNearestEven) {
  const float bounds[] = {.25f, .75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
  const int at_bound[] = {0, 2, 2, 4, 4, 6, 6};
  for (int i = 0; i < 7; ++i) {
    EXPECT_EQ(E2M1::encode(std::nextafter(bounds[i], 0.0f)), i);
    EXPECT_EQ(E2M1::encode(bounds[i]), at_bound[i]);
    EXPECT_EQ(E2M1::encode(std::nextafter(bounds[i], 9.0f)), i + 1);
  }
  expect_encode_is_nearest<E2M1>(kGrid);
}

TEST(E2M1, SignsOfZeroAndSpecials) {
  EXPECT_EQ(E2M1::encode(-0.0f), 0x8);
  EXPECT_EQ(E2M1::encode(-1e-40f), 0x8);
  EXPECT_EQ(E2M1::encode(HUGE_VALF), 0x7);
  EXPECT_EQ(E2M1::encode(-HUGE_VALF), 0xF);
  EXPECT_EQ(E2M1::encode(from_bits(0xFFC00000u)), 0x7);
  EXPECT_EQ(E2M1::encode_stochastic(from_bits(0xFF800001u), 255), 0x7);
}

TEST(E2M1, Stochastic) {
  expect_values_stay<E2M1>(kGrid);
  expect_stochastic_is_largest_below<E2M1>(kGrid);
  expect_exact_probabilities<E2M1>(kGrid);
}

TEST(E2M1, PacksTheFirstOfAPairLow) {
  static_assert(E2M1::pack(0x3, 0xA) == 0xA3);
  for (uint8_t byte = 0;; ++byte) {
    EXPECT_EQ(E2M1::pack(E2M1::unpack(byte, false), E2M1::unpack(byte, true)), byte);
    if (byte == 255) break;
  }
}

TEST(E2M1, FlushModeIsHarmless) { expect_flush_mode_is_harmless<E2M1>(kGrid); }

TEST(E2M1, DISABLED_AllPatterns) { expect_nearest_for_all_patterns<E2M1>(kGrid); }

}  // namespace
}  // namespace moiety::testing
