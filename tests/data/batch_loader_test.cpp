#include "moiety/data/batch_loader.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/error.h"
#include "tests/data/data_helpers.h"
#include "tests/support/error_of.h"

namespace moiety::data {
namespace {

using Rows = std::vector<std::vector<int32_t>>;

std::vector<int32_t> row(const TensorView& x_BS, int64_t b) {
  const int32_t* p = x_BS.data<int32_t>() + b * x_BS.size(1);
  return {p, p + x_BS.size(1)};
}

Rows rows(const TensorView& x_BS) {
  Rows list;
  for (int64_t b = 0; b < x_BS.size(0); ++b) list.push_back(row(x_BS, b));
  return list;
}

std::shared_ptr<const SampleSource> open(const std::vector<WeightedPath>& files, int64_t seq_len) {
  return open_token_files(files, seq_len, 264, Tokenizer::load("bytes").identity());
}

Sampler make_sampler(const SampleSource& source, bool shuffle = true, uint64_t epochs = 0) {
  return Sampler(source.sources(), 1234, shuffle, epochs);
}

// The rows that a data rank gets in `steps` steps, one after the other.
Rows run(const std::shared_ptr<const SampleSource>& source, Sampler sampler,
         const LoaderConfig& config, int64_t steps) {
  BatchLoader loader(source, std::move(sampler), config);
  Rows all;
  const int64_t micro_steps = config.global_batch / (config.micro_batch * config.data_ranks);
  for (int64_t k = 0; k < steps * micro_steps; ++k) {
    const Batch* batch = loader.next();
    EXPECT_NE(batch, nullptr);
    for (auto& r : rows(batch->token_BS)) all.push_back(std::move(r));
  }
  return all;
}

class BatchLoaderTest : public testing::Test {
 protected:
  // Two sources, 24 and 13 samples of 8 tokens; tokens tell the position.
  std::vector<WeightedPath> files() {
    return {{write_tokens(dir_ / "a.tok", {ramp(200)}), 2},
            {write_tokens(dir_ / "b.tok", {ramp(50, 3), ramp(60, 7)}), 1}};
  }
  TemporaryDirectory dir_;
};

TEST_F(BatchLoaderTest, TargetsAreTheNextTokens) {
  const auto source = open({{write_tokens(dir_ / "a.tok", {ramp(17)})}}, 8);
  BatchLoader loader(source, make_sampler(*source, false, 1),
                     {.micro_batch = 2, .global_batch = 2});
  const Batch* batch = loader.next();
  EXPECT_EQ(rows(batch->token_BS),
            (Rows{{0, 1, 2, 3, 4, 5, 6, 7}, {8, 9, 10, 11, 12, 13, 14, 15}}));
  EXPECT_EQ(rows(batch->target_BS),
            (Rows{{1, 2, 3, 4, 5, 6, 7, 8}, {9, 10, 11, 12, 13, 14, 15, 16}}));
  EXPECT_FALSE(batch->position_BS.defined());
  EXPECT_EQ(loader.next(), nullptr);
  EXPECT_EQ(loader.next(), nullptr);
}

TEST_F(BatchLoaderTest, DocumentMask) {
  // Documents of 3, 9 and 5 tokens; samples [0, 8] and [8, 16].
  const auto source = open({{write_tokens(dir_ / "a.tok", {ramp(3), ramp(9), ramp(5)})}}, 8);
  BatchLoader loader(source, make_sampler(*source, false),
                     {.micro_batch = 2, .global_batch = 2, .document_mask = true});
  const Batch* batch = loader.next();
  EXPECT_EQ(rows(batch->position_BS), (Rows{{0, 1, 2, 0, 1, 2, 3, 4}, {0, 1, 2, 3, 0, 1, 2, 3}}));
  EXPECT_EQ(rows(batch->target_BS),
            (Rows{{1, 2, kNoTarget, 1, 2, 3, 4, 5}, {6, 7, 8, kNoTarget, 1, 2, 3, 4}}));
}

// The mask belongs to targets: where token i + 1 is none, place i has no loss.
TEST_F(BatchLoaderTest, LossMask) {
  const auto source =
      open({{write_masked(dir_ / "a.tok",
                          {{{1, 2, 3, 4, 5, 256}, {0, 0, 0, 1, 1, 1}}, {{6, 7, 256}, {0, 1, 1}}})}},
           4);
  const Rows none{{kNoTarget, kNoTarget, 4, 5}, {256, kNoTarget, 7, 256}};
  for (const bool document_mask : {false, true}) {
    BatchLoader loader(source, make_sampler(*source, false, 1),
                       {.micro_batch = 2, .global_batch = 2, .document_mask = document_mask});
    const Batch* batch = loader.next();
    EXPECT_EQ(rows(batch->token_BS), (Rows{{1, 2, 3, 4}, {5, 256, 6, 7}}));
    EXPECT_EQ(rows(batch->target_BS), none);
  }
  // Text is that of the targets: 7 bytes for 5 targets, of which the samples have 3 and 5.
  EXPECT_DOUBLE_EQ(ValidationSet(source, 1, {}).source_bytes(), 7 * 2 / 5.0);
  EXPECT_DOUBLE_EQ(ValidationSet(source, 2, {}).source_bytes(), 7);
  const auto other =
      open({{write_masked(dir_ / "b.tok",
                          {{{1, 2, 3, 4, 5, 256}, {0, 0, 1, 1, 1, 1}}, {{6, 7, 256}, {0, 1, 1}}})}},
           4);
  EXPECT_NE(source->sources()[0].identity, other->sources()[0].identity);
}

TEST_F(BatchLoaderTest, SetOfAStepIsTheSameForEveryLayout) {
  const auto source = open(files(), 8);
  constexpr int64_t kSteps = 5;
  const LoaderConfig one{.micro_batch = 12, .global_batch = 12};
  const Rows reference = run(source, make_sampler(*source), one, kSteps);
  for (const int ranks : {1, 2, 3, 4, 6, 12}) {
    for (const int64_t micro_batch : {1, 2, 3, 4, 6, 12}) {
      if (12 % (ranks * micro_batch) != 0) continue;
      Rows got(reference.size());
      for (int d = 0; d < ranks; ++d) {
        const LoaderConfig config{
            .micro_batch = micro_batch, .global_batch = 12, .data_rank = d, .data_ranks = ranks};
        const Rows mine = run(source, make_sampler(*source), config, kSteps);
        for (size_t i = 0; i < mine.size(); ++i) {
          const size_t m = i / micro_batch, b = i % micro_batch;  // m counts on over steps
          got[(m * ranks + d) * micro_batch + b] = mine[i];
        }
      }
      EXPECT_EQ(got, reference) << ranks << " ranks, micro batch " << micro_batch;
    }
  }
}

TEST_F(BatchLoaderTest, ResumeAfterEachStepAndAnyPrefetchEqualsUninterrupted) {
  const auto source = open(files(), 8);
  LoaderConfig config{.micro_batch = 2, .global_batch = 8, .data_rank = 1, .data_ranks = 2};
  constexpr int64_t kSteps = 9;  // source b is in its second epoch in the end
  const Rows all = run(source, make_sampler(*source), config, kSteps);
  for (int64_t stop = 0; stop <= kSteps; ++stop) {
    for (const int prefetch : {1, 2, 4, 64}) {
      config.prefetch = prefetch;
      SamplerState saved;
      {
        BatchLoader loader(source, make_sampler(*source), config);
        for (int64_t k = 0; k < stop * 2; ++k) loader.next();
        saved = loader.state();
      }
      EXPECT_EQ(saved.sample, static_cast<uint64_t>(stop * 8));
      Sampler sampler = make_sampler(*source);
      sampler.restore(saved);
      const Rows rest = run(source, sampler, config, kSteps - stop);
      EXPECT_EQ(rest, Rows(all.begin() + stop * 4, all.end())) << stop << ", " << prefetch;
    }
  }
}

TEST_F(BatchLoaderTest, StateMovesOnlyAtStepBorders) {
  const auto source = open(files(), 8);
  BatchLoader loader(source, make_sampler(*source), {.micro_batch = 1, .global_batch = 3});
  std::vector<uint64_t> samples{loader.state().sample};
  for (int k = 0; k < 6; ++k) {
    loader.next();
    samples.push_back(loader.state().sample);
  }
  EXPECT_EQ(samples, (std::vector<uint64_t>{0, 0, 0, 3, 3, 3, 6}));
}

TEST_F(BatchLoaderTest, BatchStaysValidUntilTheNext) {
  const auto source = open(files(), 8);
  for (const int prefetch : {1, 3}) {
    BatchLoader loader(source, make_sampler(*source, false),
                       {.micro_batch = 1, .global_batch = 1, .prefetch = prefetch});
    for (int k = 0; k < 20; ++k) {
      const Batch* batch = loader.next();
      const auto before = rows(batch->token_BS);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the thread fills its ring
      ASSERT_EQ(rows(batch->token_BS), before);
    }
  }
}

TEST_F(BatchLoaderTest, ShrunkFileStopsWithAnErrorBehindTheBatchesMadeBefore) {
  const std::string path = write_tokens(dir_ / "a.tok", {ramp(100000)});
  const auto source = open({{path}}, 8);
  BatchLoader loader(source, make_sampler(*source),
                     {.micro_batch = 1, .global_batch = 1, .prefetch = 4});
  ASSERT_NE(loader.next(), nullptr);
  std::filesystem::resize_file(path, 5000);
  const std::string error = kind_and_error_of([&] {
    for (int k = 0; k < 1000; ++k) ASSERT_NE(loader.next(), nullptr);
  });
  EXPECT_EQ(error.substr(0, 6 + path.size()), "data: " + path);
  EXPECT_NE(error.find("has 5000 now"), std::string::npos) << error;
  EXPECT_EQ(kind_and_error_of([&] { loader.next(); }), error);
}

TEST_F(BatchLoaderTest, IsDestroyedAtAnyTime) {
  const auto source = open(files(), 8);
  for (int taken = 0; taken < 12; ++taken) {
    BatchLoader loader(source, make_sampler(*source),
                       {.micro_batch = 1, .global_batch = 2, .prefetch = 1 + taken % 3});
    for (int k = 0; k < taken; ++k) loader.next();
  }
}

TEST_F(BatchLoaderTest, BadShapesAreNamed) {
  const auto source = open(files(), 8);
  for (const LoaderConfig& config : std::vector<LoaderConfig>{
           {.micro_batch = 0}, {.prefetch = 0}, {.data_rank = 2, .data_ranks = 2}}) {
    EXPECT_THROW(BatchLoader(source, make_sampler(*source), config), Error);
  }
  try {
    BatchLoader(source, make_sampler(*source),
                {.micro_batch = 3, .global_batch = 8, .data_ranks = 2});
    FAIL();
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(),
                 "batch loader: global_batch=8 must be a multiple of micro_batch x data ranks = "
                 "3 x 2");
  }
}

TEST_F(BatchLoaderTest, OneSampleIsEnough) {
  const auto source = open({{write_tokens(dir_ / "a.tok", {ramp(9)})}}, 8);
  EXPECT_EQ(run(source, make_sampler(*source), {.micro_batch = 1, .global_batch = 2}, 1),
            (Rows{{0, 1, 2, 3, 4, 5, 6, 7}, {0, 1, 2, 3, 4, 5, 6, 7}}));
}

TEST_F(BatchLoaderTest, SequencesOfOneToken) {
  const auto source = open({{write_tokens(dir_ / "a.tok", {ramp(3)})}}, 1);
  EXPECT_EQ(run(source, make_sampler(*source, false), {.micro_batch = 1, .global_batch = 2}, 1),
            (Rows{{0}, {1}}));
}

TEST(OpenTokenFiles, WhatDoesNotFitIsDataError) {
  const TemporaryDirectory dir;
  const Sha256 bytes = Tokenizer::load("bytes").identity();
  const std::string path = write_tokens(dir / "a.tok", {ramp(8)});
  const auto error = [&](int64_t seq_len, uint32_t vocab, const Sha256& identity) {
    return kind_and_error_of(
        [&] { open_token_files(std::vector<WeightedPath>{{path}}, seq_len, vocab, identity); });
  };
  EXPECT_EQ(error(7, 264, bytes), "no error");
  EXPECT_EQ(error(8, 264, bytes),
            "data: " + path + ": 8 tokens are too few for one sample of seq_len + 1 = 9");
  EXPECT_EQ(error(7, 263, bytes),
            "data: " + path + ": its vocabulary of 264 does not fit the model's of 263");
  EXPECT_EQ(error(7, 264, sha256("other")).substr(0, 6 + path.size() + 30),
            "data: " + path + ": made with another tokenizer:");
}

// An id that the check at opening has not seen.
TEST(OpenTokenFiles, IdBeyondTheVocabularyStopsTheLoader) {
  const TemporaryDirectory dir;
  const std::string path = write_tokens(dir / "a.tok", {ramp(64)});
  const auto source = open({{path}}, 8);
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(4096 + 2 * 21);
    file.write("\x39\x30", 2);
  }
  BatchLoader loader(source, make_sampler(*source, false), {.micro_batch = 1, .global_batch = 1});
  EXPECT_NE(loader.next(), nullptr);
  EXPECT_NE(loader.next(), nullptr);
  EXPECT_EQ(kind_and_error_of([&] { loader.next(); }),
            "data: " + path + ": token 21 is 12345, the vocabulary has 264");
}

TEST(SyntheticSource, KindsKeepTheirPromises) {
  constexpr int64_t S = 63;
  constexpr uint32_t V = 100;
  ReadSample a(S), b(S);
  for (const char* kind : {"uniform", "copy", "markov"}) {
    const auto source = synthetic_source(kind, S, V, 7);
    std::set<int32_t> ids;
    std::vector<std::set<int32_t>> successors(V);
    for (uint64_t i = 0; i < 400; ++i) {
      a.read(*source, {0, i}, true);
      b.read(*source, {0, i});
      ASSERT_EQ(a.token, b.token);
      ASSERT_EQ(a.target, b.target);
      ASSERT_EQ(a.position[S - 1], S - 1);
      ids.insert(a.token.begin(), a.token.end());
      for (int64_t p = 0; p < S; ++p) successors[a.token[p]].insert(a.target[p]);
      if (std::string(kind) == "copy") {
        for (int64_t p = 32; p <= S; ++p) ASSERT_EQ(a.target[p - 1], a.token[p - 32]);
      }
    }
    EXPECT_GE(*ids.begin(), 0);
    EXPECT_LT(*ids.rbegin(), static_cast<int32_t>(V));
    EXPECT_GT(ids.size(), 90u) << kind;
    for (const auto& next : successors) {
      if (std::string(kind) == "markov") {
        EXPECT_LE(next.size(), 4u);
      } else {
        EXPECT_GT(next.size(), 40u) << kind;
      }
    }
    b.read(*source, {0, 400});
    EXPECT_NE(a.token, b.token);
    b.read(*synthetic_source(kind, S, V, 8), {0, 399});
    EXPECT_NE(a.token, b.token);
  }
  EXPECT_EQ(kind_and_error_of([] { synthetic_source("zipf", 8, 8, 0); }),
            "usage: data.synthetic is 'zipf'; there are: uniform, copy, markov");
}

TEST(SyntheticSource, GoesThroughTheLoader) {
  const auto source = synthetic_source("uniform", 16, 264, 1);
  const Rows got = run(source, make_sampler(*source), {.micro_batch = 2, .global_batch = 4}, 3);
  EXPECT_EQ(std::set<std::vector<int32_t>>(got.begin(), got.end()).size(), 12u);
}

TEST(ValidationSet, FirstSamplesOfEachSourceWhateverTheRanks) {
  const TemporaryDirectory dir;
  const auto source = open(
      {{write_tokens(dir / "a.tok", {ramp(100)})}, {write_tokens(dir / "b.tok", {ramp(26, 5)}), 9}},
      8);
  Rows expected;
  ReadSample sample(8);
  for (const SampleRef ref :
       std::vector<SampleRef>{{0, 0}, {0, 1}, {0, 2}, {0, 3}, {0, 4}, {1, 0}, {1, 1}, {1, 2}}) {
    sample.read(*source, ref);
    expected.push_back(sample.token);
  }
  for (const int ranks : {1, 2, 3}) {
    for (const int64_t micro_batch : {1, 3}) {
      Rows got;
      int64_t targets = 0;
      for (int d = 0; d < ranks; ++d) {
        ValidationSet set(source, 5,
                          {.micro_batch = micro_batch, .data_rank = d, .data_ranks = ranks});
        // Five samples of one source, then three of the other, each in batches of its own.
        const int64_t all = ranks * micro_batch, first = (5 + all - 1) / all;
        EXPECT_EQ(set.batches(), first + (3 + all - 1) / all);
        EXPECT_EQ(set.sources(), 2);
        EXPECT_EQ(set.name(1), dir / "b.tok");
        EXPECT_DOUBLE_EQ(set.source_bytes(0), 40 * 99 / 100.0);
        EXPECT_DOUBLE_EQ(set.source_bytes(1), 24 * 25 / 26.0);
        EXPECT_DOUBLE_EQ(set.source_bytes(), 40 * 99 / 100.0 + 24 * 25 / 26.0);
        for (int64_t k = 0; k < set.batches(); ++k) {
          const Batch& batch = set.batch(k);
          const bool second = set.source_of(k) == 1;
          EXPECT_EQ(second, k >= first);
          const size_t begin = second ? 5 : 0, end = second ? 8 : 5;
          for (int64_t b = 0; b < micro_batch; ++b) {
            const std::vector<int32_t> target = row(batch.target_BS, b);
            targets += 8 - std::count(target.begin(), target.end(), kNoTarget);
            const bool counted = target[0] != kNoTarget;
            const int64_t own = second ? k - first : k;
            const size_t at = begin + size_t((own * ranks + d) * micro_batch + b);
            EXPECT_EQ(counted, at < end);
            if (at >= end) continue;
            if (got.size() <= at) got.resize(at + 1);
            got[at] = row(batch.token_BS, b);
          }
        }
      }
      EXPECT_EQ(targets, 64);
      got.resize(8);
      EXPECT_EQ(got, expected) << ranks << ", " << micro_batch;
    }
  }
}

}  // namespace
}  // namespace moiety::data
