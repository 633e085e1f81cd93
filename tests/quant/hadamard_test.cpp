#include "moiety/quant/hadamard.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace moiety::quant {
namespace {

constexpr uint16_t kSigns = 0xD7E8;

// Entry (i, j) of the transform, times 4.
int entry(int i, int j, uint16_t signs) {
  const int sylvester = std::popcount(static_cast<unsigned>(i & j)) % 2 == 0 ? 1 : -1;
  return (signs >> j & 1) != 0 ? -sylvester : sylvester;
}

void fill_integers(std::mt19937& random, float (&x)[16]) {
  std::uniform_int_distribution<int> digit(-15, 15);
  for (float& v : x) v = static_cast<float>(digit(random));
}

TEST(Hadamard, OfOnes) {  // docs/spec/formats.md#goldens
  float x[16];
  std::fill(x, x + 16, 1.0f);
  apply_rht(x, kSigns);
  const float want[16] = {-1, 0, 1, 0, 1, 0, -1, 0, 1, 2, 1, 0, 1, 0, 1, -2};
  for (int i = 0; i < 16; ++i) EXPECT_EQ(x[i], want[i]) << i;
}

TEST(Hadamard, IsTheSignedSylvesterMatrix) {
  for (uint16_t signs : {uint16_t{0}, kSigns, uint16_t{0xFFFF}}) {
    for (int j = 0; j < 16; ++j) {
      float x[16] = {};
      x[j] = 1;
      apply_rht(x, signs);
      for (int i = 0; i < 16; ++i) EXPECT_EQ(x[i], 0.25f * entry(i, j, signs)) << i << ' ' << j;
    }
  }
}

// Values stay below 256 quarters, which BF16 holds, so every step is exact.
TEST(Hadamard, KeepsProductsOfIntegers) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 200; ++trial) {
    float x[16], y[16], before = 0, after = 0;
    fill_integers(random, x);
    fill_integers(random, y);
    for (int i = 0; i < 16; ++i) before += x[i] * y[i];
    const auto signs = static_cast<uint16_t>(random());
    apply_rht(x, signs);
    apply_rht(y, signs);
    for (int i = 0; i < 16; ++i) after += x[i] * y[i];
    EXPECT_EQ(before, after);
  }
}

TEST(Hadamard, UndoesItself) {
  std::mt19937 random(2);
  for (int trial = 0; trial < 200; ++trial) {
    float x[16], y[16];
    fill_integers(random, x);
    std::copy(x, x + 16, y);
    const auto signs = static_cast<uint16_t>(random());
    apply_rht(y, signs);
    undo_rht(y, signs);
    for (int i = 0; i < 16; ++i) EXPECT_EQ(x[i], y[i]);
  }
}

// The stated order of additions, each rounded, then one rounding to BF16, on values that do round.
TEST(Hadamard, RoundsInTheStatedOrder) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  int inexact = 0;
  for (int trial = 0; trial < 200; ++trial) {
    float x[16], w[16];
    double exact[16] = {};
    for (int i = 0; i < 16; ++i)
      x[i] = bf16(std::ldexp(normal(random), static_cast<int>(random() % 40)));
    for (int i = 0; i < 16; ++i) {
      w[i] = (kSigns >> i & 1) != 0 ? -x[i] : x[i];
      for (int j = 0; j < 16; ++j) exact[i] += 0.25 * entry(i, j, kSigns) * x[j];
    }
    for (int h : {1, 2, 4, 8}) {
      float next[16];
      for (int i = 0; i < 16; ++i) next[i] = (i & h) == 0 ? w[i] + w[i + h] : w[i - h] - w[i];
      std::copy(next, next + 16, w);
    }
    apply_rht(x, kSigns);
    for (int i = 0; i < 16; ++i) {
      EXPECT_EQ(std::bit_cast<uint32_t>(x[i]), std::bit_cast<uint32_t>(float(bf16(0.25f * w[i]))));
      inexact += w[i] * 0.25 != exact[i];
    }
  }
  EXPECT_GT(inexact, 100);
}

TEST(Hadamard, RoundingComesLast) {
  std::mt19937 random(4);
  float unrounded[16], x[16];
  for (int i = 0; i < 16; ++i) {
    unrounded[i] = x[i] = bf16(static_cast<float>(random() % 100000) / 7);
  }
  rotate_unrounded(unrounded, kSigns);
  apply_rht(x, kSigns);
  for (int i = 0; i < 16; ++i) EXPECT_EQ(x[i], bf16(unrounded[i])) << i;
}

TEST(Hadamard, NanAndInfinityReachEveryElement) {
  for (float bad : {std::bit_cast<float>(0xFFC00000u), HUGE_VALF}) {
    float x[16] = {};
    x[5] = bad;
    x[6] = -bad;
    apply_rht(x, kSigns);
    for (float v : x) EXPECT_FALSE(std::isfinite(v));
    for (float v : x) {
      if (std::isnan(v)) {
        EXPECT_EQ(std::bit_cast<uint32_t>(v), 0x7FFF0000u);
      }
    }
  }
}

}  // namespace
}  // namespace moiety::quant
