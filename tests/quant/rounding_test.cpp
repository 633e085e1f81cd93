#include "moiety/quant/rounding.h"

#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/formats/bf16.h"
#include "moiety/formats/e2m1.h"
#include "moiety/formats/e4m3.h"
#include "moiety/formats/e5m2.h"
#include "moiety/quant/random_bytes.h"

namespace moiety::quant {
namespace {

constexpr RngState kState{0x0123456789ABCDEFull, 3};
constexpr uint32_t kTensor = 7;

std::vector<int> bytes(const PhiloxBlock& block) {
  std::vector<int> out;
  for (int i = 0; i < 16; ++i) out.push_back(random_byte(block, i));
  return out;
}

TEST(Rounding, GoldenBytes) {  // docs/spec/formats.md#random-bits
  EXPECT_EQ(bytes(RandomStream::make(kState, kTensor, 0, false).block(0)),
            (std::vector<int>{0xBE, 0x54, 0x6B, 0x77, 0x93, 0xFE, 0xC9, 0x50, 0xA1, 0xEA, 0x04,
                              0xD3, 0x8F, 0x2E, 0x12, 0xC4}));
  EXPECT_EQ(bytes(RandomStream::make(kState, kTensor, 6, true).block(0)),
            (std::vector<int>{0x0A, 0x03, 0x7C, 0x08, 0xA9, 0xFD, 0x55, 0xF7, 0x03, 0x97, 0x21,
                              0x2A, 0xEB, 0x98, 0x0A, 0x7C}));
  EXPECT_EQ(bytes(RandomStream::make(kState, kTensor, 0, false).block((1ull << 33) + 5)),
            (std::vector<int>{0xEA, 0xBD, 0x06, 0x4E, 0x30, 0xDF, 0x2C, 0xBA, 0x45, 0xF1, 0xE7,
                              0xF5, 0x28, 0x91, 0xB9, 0x1F}));
}

TEST(Rounding, CounterHoldsEveryField) {
  const uint64_t b = 0x7ABC'1234'5678ull;
  const PhiloxKey key{0x89ABCDEFu, 0x01234567u};
  const RngState late{kState.seed, 0x5'8000'0001ull};  // the low word of draw counts
  EXPECT_EQ(RandomStream::make(late, kTensor, 0xFFFF, true).block(b),
            philox(key, {0x12345678u, 0x7ABCu | 0xFFFFu << 15 | 1u << 31, kTensor, 0x80000001u}));
  EXPECT_EQ(RandomStream::make(kState, kTensor, 0, false).high_block(b),
            philox(key, {0x12345678u, 0x7ABCu, kTensor, 3 | 1u << 31}));
}

TEST(Rounding, ManyBlocksAtOnce) {
  const auto stream = RandomStream::make(kState, kTensor, 6, true);
  for (uint64_t first : {0ull, 3ull, 0xFFFF'FFFEull, (1ull << 47) - 9}) {
    for (int64_t blocks : {0, 1, 2, 3, 4, 5, 7, 8, 9}) {
      std::vector<uint8_t> got(16 * blocks + 1, 0xA5), want;
      random_bytes(stream, {first, 0, 1, blocks}, got.data(), 0);
      for (int64_t b = 0; b < blocks; ++b) {
        for (int byte : bytes(stream.block(first + static_cast<uint64_t>(b)))) {
          want.push_back(static_cast<uint8_t>(byte));
        }
      }
      want.push_back(0xA5);
      EXPECT_EQ(got, want) << first << ' ' << blocks;
    }
  }
}

TEST(Rounding, ShardsSeeTheBlocksOfTheWhole) {
  const int64_t cols = 100;  // 7 blocks a row
  const auto whole = BlockPosition::make(0, 0, cols);
  const auto shard = BlockPosition::make(5, 48, cols);
  EXPECT_EQ(whole.block(0, 0), 0u);
  EXPECT_EQ(whole.block(1, 0), 7u);
  for (int64_t row = 0; row < 3; ++row) {
    for (int64_t block = 0; block < 4; ++block) {
      EXPECT_EQ(shard.block(row, block), whole.block(row + 5, block + 3));
    }
  }
  const auto large = BlockPosition::make(1ll << 36, 1ll << 13, 1ll << 14);
  EXPECT_EQ(large.block(1, 2), ((1ull << 36) + 1) * 1024 + 512 + 2);
}

// 2^20 draws of one value: the mean is that of floor(256 f + 1/2) / 256 within 4 sigma.
template <class F>
void expect_mean(float x, float low, float step) {
  const auto stream = RandomStream::make(kState, kTensor, 0, false);
  int64_t ups = 0;
  const int64_t blocks = 1 << 16;
  for (int64_t b = 0; b < blocks; ++b) {
    const PhiloxBlock block = stream.block(static_cast<uint64_t>(b));
    for (int i = 0; i < 16; ++i) {
      const float y = F::decode(F::encode_stochastic(x, random_byte(block, i)));
      ASSERT_TRUE(y == low || y == low + step) << x << ' ' << y;
      ups += y != low;
    }
  }
  const double n = 16.0 * blocks;
  const double p = std::floor(256.0 * (x - low) / step + 0.5) / 256;
  EXPECT_NEAR(static_cast<double>(ups) / n, p, 4 * std::sqrt(p * (1 - p) / n)) << x;
}

TEST(Rounding, MeanOfManyDraws) {
  expect_mean<E2M1>(0.1f, 0.0f, 0.5f);
  expect_mean<E2M1>(1.77f, 1.5f, 0.5f);
  expect_mean<E2M1>(2.345f, 2.0f, 1.0f);
  expect_mean<E2M1>(5.9f, 4.0f, 2.0f);
  expect_mean<E4M3>(0x1.4p-10f, 0.0f, 0x1p-9f);
  expect_mean<E4M3>(437.0f, 416.0f, 32.0f);
  expect_mean<E5M2>(-3.14159f, -3.0f, -0.5f);
}

TEST(Rounding, Bf16TakesTwoBytes) {
  const auto stream = RandomStream::make(kState, kTensor, 0, false);
  const PhiloxBlock low = stream.block(9), high = stream.high_block(9);
  for (int i = 0; i < 16; ++i) {
    EXPECT_EQ(random_half(low, high, i), random_byte(low, i) + 256 * random_byte(high, i));
  }
  int64_t ups = 0;
  const int64_t blocks = 1 << 16;
  const float x = 1.0f + 0x1p-7f * 0.3f;  // between neighbours 2^-7 apart
  for (int64_t b = 0; b < blocks; ++b) {
    const auto n = static_cast<uint64_t>(b);
    const PhiloxBlock first = stream.block(n), second = stream.high_block(n);
    for (int i = 0; i < 16; ++i) {
      ups += bf16::encode_stochastic(x, random_half(first, second, i)) != 0x3F80;
    }
  }
  const double n = 16.0 * blocks;
  EXPECT_NEAR(static_cast<double>(ups) / n, 0.3, 4 * std::sqrt(0.3 * 0.7 / n));
}

// The mean of the 256 bytes is x to half a 256th of a step, and these errors cancel over fractions.
TEST(Rounding, NoBiasOverFractions) {
  double total = 0;
  for (int k = 0; k < 4096; ++k) {
    const float x = 2.0f + (static_cast<float>(k) + 0.5f) / 4096;
    double mean = 0;
    for (int r8 = 0; r8 < 256; ++r8) {
      mean += E2M1::decode(E2M1::encode_stochastic(x, static_cast<uint8_t>(r8))) / 256.0;
    }
    EXPECT_LE(std::fabs(mean - x), 1.0 / 512) << x;
    total += mean - x;
  }
  EXPECT_EQ(total, 0);
}

}  // namespace
}  // namespace moiety::quant
