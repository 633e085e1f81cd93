#include "moiety/data/sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "tests/data/data_helpers.h"
#include "tests/support/error_of.h"

namespace moiety::data {
namespace {

SamplerSource source(uint64_t samples, uint64_t weight, uint32_t id = 1) {
  return {{id, samples * 10, weight}, samples};
}

std::vector<SamplerSource> mixture(std::span<const double> weights,
                                   std::span<const uint64_t> samples) {
  const std::vector<uint64_t> whole = integer_weights(weights);
  std::vector<SamplerSource> list;
  for (size_t s = 0; s < whole.size(); ++s) {
    list.push_back(source(samples[s], whole[s], static_cast<uint32_t>(s)));
  }
  return list;
}

std::vector<SampleRef> take(Sampler& sampler, int64_t count) {
  std::vector<SampleRef> samples;
  EXPECT_TRUE(sampler.take(count, samples));
  return samples;
}

std::vector<uint64_t> order(uint64_t n, uint64_t seed, uint32_t source, uint32_t epoch) {
  const Permutation p(n, seed, source);
  std::vector<uint64_t> list;
  for (uint64_t j = 0; j < n; ++j) list.push_back(p(j, epoch));
  return list;
}

TEST(Permutation, IsOne) {
  for (const uint64_t n : {1, 2, 3, 4, 5, 16, 17, 1025}) {
    for (const uint32_t epoch : {0u, 1u, 7u}) {
      std::vector<uint64_t> list = order(n, 1234, 0, epoch);
      std::sort(list.begin(), list.end());
      std::vector<uint64_t> all(n);
      std::iota(all.begin(), all.end(), 0);
      EXPECT_EQ(list, all) << "N = " << n << ", epoch " << epoch;
    }
  }
}

// The values come from an implementation of docs/spec/trainer.md#order-of-samples in another
// language.
TEST(Permutation, Golden) {
  EXPECT_EQ(order(17, 1234, 0, 0),
            (std::vector<uint64_t>{11, 1, 12, 5, 15, 10, 0, 14, 7, 16, 6, 9, 13, 8, 2, 3, 4}));
  EXPECT_EQ(order(17, 1234, 0, 1),
            (std::vector<uint64_t>{1, 15, 7, 2, 14, 5, 11, 6, 16, 4, 9, 8, 0, 10, 13, 12, 3}));
  EXPECT_EQ(order(5, (uint64_t{1} << 40) + 7, 3, 2), (std::vector<uint64_t>{3, 2, 1, 4, 0}));
  const std::vector<uint64_t> long_one = order(1025, 1234, 0, 0);
  uint64_t sum = 0;
  for (uint64_t j = 0; j < 1025; ++j) sum += j * long_one[j];
  EXPECT_EQ(sum, 272647530u);
}

TEST(Permutation, HugeSourceStaysInRange) {
  const uint64_t n = (uint64_t{1} << 40) + 1;
  const Permutation p(n, 5, 0);
  std::set<uint64_t> seen;
  for (uint64_t j = 0; j < 1000; ++j) {
    const uint64_t i = p(n - 1 - j, 0);
    EXPECT_LT(i, n);
    EXPECT_TRUE(seen.insert(i).second);
  }
}

TEST(IntegerWeights, SumTo2To32) {
  const uint64_t whole = uint64_t{1} << 32;
  EXPECT_EQ(integer_weights(std::vector<double>{5.0}), std::vector<uint64_t>{whole});
  EXPECT_EQ(integer_weights(std::vector<double>{1, 1, 1}),
            (std::vector<uint64_t>{whole / 3 + 1, whole / 3, whole / 3}));
  EXPECT_EQ(integer_weights(std::vector<double>{3, 1}),
            (std::vector<uint64_t>{whole / 4 * 3, whole / 4}));
  for (int n = 1; n < 50; ++n) {
    std::vector<double> weights;
    for (int i = 0; i < n; ++i) weights.push_back(0.1 + i * i * 1e-3);
    const auto w = integer_weights(weights);
    EXPECT_EQ(std::accumulate(w.begin(), w.end(), uint64_t{0}), whole) << n;
  }
}

TEST(Sampler, EpochsAreWholeAndDiffer) {
  Sampler sampler(std::vector{source(17, uint64_t{1} << 32)}, 1234, true, 0);
  for (uint32_t epoch = 0; epoch < 3; ++epoch) {
    std::vector<uint64_t> indices;
    for (const SampleRef& s : take(sampler, 17)) indices.push_back(s.index);
    EXPECT_EQ(indices, order(17, 1234, 0, epoch));
  }
  EXPECT_EQ(sampler.state().sample, 51u);
  EXPECT_EQ(sampler.state().sources[0].epoch, 3u);
  EXPECT_EQ(sampler.state().sources[0].position, 0u);
}

TEST(Sampler, UnshuffledGoesInOrder) {
  Sampler sampler(std::vector{source(3, uint64_t{1} << 32)}, 1, false, 0);
  std::vector<uint64_t> indices;
  for (const SampleRef& s : take(sampler, 7)) indices.push_back(s.index);
  EXPECT_EQ(indices, (std::vector<uint64_t>{0, 1, 2, 0, 1, 2, 0}));
}

TEST(Sampler, MixtureStaysWithinTwoOfItsWeights) {
  const std::vector<double> weights{0.5, 0.3, 0.15, 0.04, 0.01};
  const std::vector<uint64_t> samples{100, 7, 1000, 3, 1};
  Sampler sampler(mixture(weights, samples), 9, true, 0);
  std::vector<double> count(weights.size());
  for (int g = 1; g <= 5000; ++g) {
    count[take(sampler, 1)[0].source] += 1;
    for (size_t s = 0; s < weights.size(); ++s) {
      ASSERT_LE(std::abs(count[s] - weights[s] * g), 2) << "source " << s << " at " << g;
    }
  }
}

TEST(Sampler, EqualWeightsTakeTurns) {
  Sampler sampler(mixture(std::vector<double>{1, 1}, std::vector<uint64_t>{5, 5}), 0, false, 0);
  EXPECT_EQ(take(sampler, 4), (std::vector<SampleRef>{{0, 0}, {1, 0}, {0, 1}, {1, 1}}));
}

TEST(Sampler, EpochsLimitEndsBeforeTheStepThatNeedsMore) {
  Sampler sampler(std::vector{source(5, uint64_t{1} << 32)}, 1, true, 2);
  std::vector<SampleRef> samples;
  EXPECT_TRUE(sampler.take(4, samples));
  EXPECT_TRUE(sampler.take(4, samples));
  const SamplerState before = sampler.state();
  EXPECT_FALSE(sampler.take(4, samples));  // 2 of 10 are left
  EXPECT_TRUE(samples.empty());
  EXPECT_EQ(sampler.state(), before);
  EXPECT_TRUE(sampler.take(2, samples));
  EXPECT_FALSE(sampler.take(1, samples));
}

TEST(Sampler, StateResumesAnywhere) {
  const auto sources = mixture(std::vector<double>{0.7, 0.2, 0.1}, std::vector<uint64_t>{13, 5, 2});
  Sampler whole(sources, 77, true, 0);
  const std::vector<SampleRef> all = take(whole, 60);
  for (int64_t stop = 0; stop <= 60; ++stop) {
    Sampler first(sources, 77, true, 0);
    take(first, stop);
    Sampler second(sources, 77, true, 0);
    second.restore(parse_sampler_state(to_json(first.state())));
    EXPECT_EQ(second.state(), first.state());
    // Another step size after the resume changes nothing.
    std::vector<SampleRef> rest;
    while (static_cast<int64_t>(rest.size()) < 60 - stop) rest.push_back(take(second, 1)[0]);
    EXPECT_EQ(rest, std::vector<SampleRef>(all.begin() + stop, all.end())) << stop;
  }
}

TEST(Sampler, StateOfOtherSourcesIsRefused) {
  const uint64_t whole = uint64_t{1} << 32;
  const Sampler saved(std::vector{source(5, whole, 0xabc)}, 1, true, 0);
  Sampler other(std::vector{source(6, whole, 0xdef)}, 1, true, 0);
  EXPECT_EQ(
      kind_and_error_of([&] { other.restore(saved.state()); }),
      "checkpoint: data.train: the checkpoint was trained on (crc32c 00000abc, 50 tokens, weight "
      "1.000000); the files now are (crc32c 00000def, 60 tokens, weight 1.000000)");
  SamplerState beyond = saved.state();
  beyond.sources[0].position = 5;
  Sampler same(std::vector{source(5, whole, 0xabc)}, 1, true, 0);
  EXPECT_NE(kind_and_error_of([&] { same.restore(beyond); }), "no error");
}

TEST(SamplerState, BadJsonIsCheckpointError) {
  const std::string good =
      to_json(Sampler(std::vector{source(5, uint64_t{1} << 32)}, 1, true, 0).state());
  EXPECT_EQ(good, R"({"sample":0,"sources":[{"crc32c":"00000001","tokens":50,"weight":4294967296,)"
                  R"("credit":0,"epoch":0,"position":0}]})");
  for (const auto& [from, to] :
       std::vector<std::pair<std::string, std::string>>{{"\"sample\":0", "\"sample\":-1"},
                                                        {"00000001", "xyz"},
                                                        {"\"epoch\":0", "\"epoch\":0.5"},
                                                        {"\"credit\":0,", ""},
                                                        {"}]}", ""}}) {
    std::string bad = good;
    bad.replace(bad.find(from), from.size(), to);
    EXPECT_EQ(kind_and_error_of([&] { parse_sampler_state(bad); }).substr(0, 27),
              "checkpoint: sampler state: ")
        << bad;
  }
}

}  // namespace
}  // namespace moiety::data
