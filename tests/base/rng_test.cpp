#include "moiety/base/rng.h"

#include <cmath>
#include <vector>

#include <gtest/gtest.h>

namespace moiety {
namespace {

TEST(Philox, KnownAnswers) {  // published with the Random123 library
  EXPECT_EQ(philox({0, 0}, {0, 0, 0, 0}),
            (PhiloxBlock{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}),
            (PhiloxBlock{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0xa4093822, 0x299f31d0}, {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}),
            (PhiloxBlock{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Rng, DomainsAreKeyedApart) {
  const uint64_t seed = 0x0123456789abcdefull;
  EXPECT_EQ(rng_key(seed, RngDomain::kStochasticRounding), (PhiloxKey{0x89abcdef, 0x01234567}));
  EXPECT_EQ(rng_key(seed, RngDomain::kInit), (PhiloxKey{0x89abcdef, 0x01234567u ^ 0x9E3779B9u}));
  EXPECT_EQ(rng_key(seed, RngDomain::kGeneration),
            (PhiloxKey{0x89abcdef, 0x01234567u ^ (5u * 0x9E3779B9u)}));
}

TEST(Rng, NormalQuantiles) {  // from Python's statistics.NormalDist().inv_cdf
  EXPECT_FLOAT_EQ(normal_from_word(0x80000000u), 2.9180994e-10f);
  EXPECT_FLOAT_EQ(normal_from_word(0), -6.3379579f);
  EXPECT_FLOAT_EQ(normal_from_word(0xFFFFFFFFu), 6.3379579f);
  EXPECT_FLOAT_EQ(normal_from_word(0x40000000u), -0.67448975f);
  EXPECT_FLOAT_EQ(normal_from_word(0xF0000000u), 1.5341206f);
}

TEST(Rng, InitIsStandardNormal) {
  const uint32_t id = tensor_id("layers.0.attn.q.weight");
  double sum = 0, squares = 0;
  const int n = 1 << 16;
  for (int i = 0; i < n; ++i) {
    const double x = init_normal(1234, id, i);
    sum += x;
    squares += x * x;
  }
  EXPECT_NEAR(sum / n, 0, 4 / std::sqrt(double(n)));
  EXPECT_NEAR(squares / n, 1, 6 / std::sqrt(double(n)));
}

TEST(Rng, RunsOfInitialWeightsAreTheirElements) {
  const uint32_t id = tensor_id("layers.0.attn.q.weight");
  std::vector<float> run(1001);
  for (const uint64_t first : {uint64_t{0}, uint64_t{3}, uint64_t{1} << 34}) {
    for (const int64_t n : {0, 1, 2, 5, 1000}) {
      run[n] = 7;
      init_normals(9, id, first, n, 0.02f, run.data());
      for (int64_t i = 0; i < n; ++i) ASSERT_EQ(run[i], 0.02f * init_normal(9, id, first + i)) << i;
      EXPECT_EQ(run[n], 7);
    }
  }
}

}  // namespace
}  // namespace moiety
