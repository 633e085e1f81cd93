// Whole documents in samples.
#include "moiety/data/packing.h"

#include <numeric>
#include <random>
#include <set>

#include <gtest/gtest.h>

#include "tests/data/data_helpers.h"
#include "tests/support/error_of.h"

namespace moiety::data {
namespace {

std::vector<std::vector<uint32_t>> documents_of(const std::vector<int64_t>& lengths) {
  std::vector<std::vector<uint32_t>> documents;
  for (const int64_t n : lengths) documents.push_back(ramp(n, uint32_t(documents.size()) + 1));
  return documents;
}

using Places = std::vector<std::vector<std::pair<uint64_t, uint32_t>>>;

Places places(const Packing& packing) {
  Places out;
  for (uint64_t i = 0; i < packing.samples(); ++i) {
    out.emplace_back();
    for (const PackedPiece& p : packing.sample(i)) out.back().emplace_back(p.begin, p.length);
  }
  return out;
}

Places pack(const std::string& path, const std::vector<int64_t>& lengths, int64_t seq_len) {
  write_tokens(path, documents_of(lengths));
  return places(Packing(*TokenFile::open(path), seq_len));
}

TEST(Packing, FirstFitDecreasing) {
  const TemporaryDirectory dir;
  // Documents at 0, 3, 8, 9, 15, 17, of which 6 + 2, 5 + 3 and 1 + 1 stand together.
  EXPECT_EQ(pack(dir / "a", {3, 5, 1, 6, 2, 1}, 8),
            (Places{{{9, 6}, {15, 2}}, {{3, 5}, {0, 3}}, {{8, 1}, {17, 1}}}));
  EXPECT_EQ(pack(dir / "b", {8, 8}, 8), (Places{{{0, 8}}, {{8, 8}}}));
  EXPECT_EQ(pack(dir / "c", {1}, 8), (Places{{{0, 1}}}));
}

TEST(Packing, LongDocumentsAreCut) {
  const TemporaryDirectory dir;
  const auto file = TokenFile::open(write_tokens(dir / "a", documents_of({19, 5, 9})));
  const Packing packing(*file, 8);
  EXPECT_EQ(packing.cut_documents(), 2u);
  EXPECT_EQ(places(packing),
            (Places{{{0, 8}}, {{8, 8}}, {{24, 8}}, {{19, 5}, {16, 3}}, {{32, 1}}}));
  EXPECT_TRUE(packing.sample(1)[0].goes_on);
  EXPECT_TRUE(packing.sample(2)[0].goes_on);
  EXPECT_FALSE(packing.sample(3)[1].goes_on);
  EXPECT_FALSE(packing.sample(4)[0].goes_on);
}

// Every token stands in one sample, documents of a window stand together, and no sample of two
// fits where one does, as with a search from the first sample on.
TEST(Packing, IsAPermutationOfDocuments) {
  const TemporaryDirectory dir;
  std::mt19937 random(1);
  std::vector<int64_t> lengths(2 * kPackWindow + 77);
  for (int64_t& n : lengths) n = 1 + int64_t(random() % (random() % 8 == 0 ? 90 : 20));
  const auto file = TokenFile::open(write_tokens(dir / "a", documents_of(lengths)));
  constexpr int64_t S = 64;
  const Packing packing(*file, S);
  std::vector<PackedPiece> all;
  for (uint64_t i = 0; i < packing.samples(); ++i) {
    uint32_t used = 0;
    for (const PackedPiece& p : packing.sample(i)) {
      used += p.length;
      all.push_back(p);
    }
    EXPECT_GE(used, 1u);
    ASSERT_LE(used, S);
  }
  std::sort(all.begin(), all.end(),
            [](const PackedPiece& a, const PackedPiece& b) { return a.begin < b.begin; });
  uint64_t at = 0;
  for (const PackedPiece& p : all) {
    ASSERT_EQ(p.begin, at);
    at += p.length;
  }
  EXPECT_EQ(at, file->header().tokens);

  const uint64_t window_end = file->document(kPackWindow).begin;
  std::vector<uint32_t> sizes, rooms;
  for (const PackedPiece& p : all) {
    if (p.begin < window_end) sizes.push_back(p.length);
  }
  std::sort(sizes.rbegin(), sizes.rend());
  for (const uint32_t n : sizes) {
    const auto fits = std::find_if(rooms.begin(), rooms.end(), [&](uint32_t r) { return r >= n; });
    fits == rooms.end() ? rooms.push_back(S - n) : void(*fits -= n);
  }
  for (size_t i = 0; i < rooms.size(); ++i) {
    uint32_t used = 0;
    for (const PackedPiece& p : packing.sample(i)) {
      ASSERT_LT(p.begin, window_end);
      used += p.length;
    }
    ASSERT_EQ(used, S - rooms[i]);
  }
  ASSERT_GE(packing.sample(rooms.size())[0].begin, window_end);
  EXPECT_EQ(places(packing), places(Packing(*file, S)));
}

std::shared_ptr<const SampleSource> open_packed(const std::string& path, int64_t seq_len) {
  return open_token_files(std::vector<WeightedPath>{{path}}, seq_len, 264,
                          Tokenizer::load("bytes").identity(), Pack::kDocuments);
}

TEST(PackedSamples, Rows) {
  const TemporaryDirectory dir;
  constexpr int32_t none = kNoTarget;
  const auto source = open_packed(
      write_masked(dir / "a.tok",
                   {{{1, 2, 3}, {0, 1, 1}},
                    {{4, 5, 6, 7}, {1, 0, 1, 1}},
                    {{8, 9, 10, 11, 12, 13, 14, 15, 16, 17}, {1, 1, 1, 1, 1, 1, 1, 1, 1, 1}}}),
      8);
  ASSERT_EQ(source->sources()[0].samples, 3u);
  BatchLoader loader(source, Sampler(source->sources(), 1, false, 1),
                     {.micro_batch = 3, .global_batch = 3, .pack = Pack::kDocuments});
  const Batch* batch = loader.next();
  const auto row = [](const TensorView& x, int64_t b) {
    std::vector<int32_t> out;
    for (int64_t s = 0; s < 8; ++s) {
      out.push_back(x.dtype() == DType::kUInt8 ? x.data<uint8_t>()[b * 8 + s]
                                               : x.data<int32_t>()[b * 8 + s]);
    }
    return out;
  };
  using Row = std::vector<int32_t>;
  EXPECT_EQ(row(batch->token_BS, 0), (Row{8, 9, 10, 11, 12, 13, 14, 15}));
  EXPECT_EQ(row(batch->target_BS, 0), (Row{9, 10, 11, 12, 13, 14, 15, 16}));
  EXPECT_EQ(row(batch->token_BS, 1), (Row{4, 5, 6, 7, 1, 2, 3, 0}));
  EXPECT_EQ(row(batch->target_BS, 1), (Row{none, 6, 7, none, 2, 3, none, none}));
  EXPECT_EQ(row(batch->position_BS, 1), (Row{0, 1, 2, 3, 0, 1, 2, 0}));
  EXPECT_EQ(row(batch->routed_BS, 1), (Row{1, 1, 1, 1, 1, 1, 1, 0}));
  EXPECT_EQ(row(batch->token_BS, 2), (Row{16, 17, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(row(batch->target_BS, 2), (Row{17, none, none, none, none, none, none, none}));
  EXPECT_EQ(row(batch->routed_BS, 2), (Row{1, 1, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(loader.next(), nullptr);
  // The first tokens of documents are no targets here, which leaves 8 of 15 in the first sample and
  // 4 in the second.
  EXPECT_DOUBLE_EQ(ValidationSet(source, 1, {.pack = Pack::kDocuments}).source_bytes(),
                   14 * 8 / 15.0);
  EXPECT_DOUBLE_EQ(ValidationSet(source, 2, {.pack = Pack::kDocuments}).source_bytes(),
                   14 * 12 / 15.0);
}

// The samples of a file with documents that all fit, in any order, have each document's targets.
TEST(PackedSamples, EveryDocumentOnceAnEpoch) {
  const TemporaryDirectory dir;
  std::vector<std::vector<uint32_t>> documents;
  for (uint32_t d = 0; d < 50; ++d) {
    documents.push_back({d, 100 + d});
    documents.back().resize(2 + d % 7, d);
  }
  const auto source = open_packed(write_tokens(dir / "a.tok", documents), 16);
  const auto samples = int64_t(source->sources()[0].samples);
  BatchLoader loader(source, Sampler(source->sources(), 1, true, 1),
                     {.micro_batch = 1, .global_batch = 1, .pack = Pack::kDocuments});
  std::multiset<int32_t> seen;
  for (int64_t i = 0; i < samples; ++i) {
    const Batch* batch = loader.next();
    ASSERT_NE(batch, nullptr);
    for (int64_t s = 0; s < 16; ++s) {
      if (batch->routed_BS.data<uint8_t>()[s] && batch->position_BS.data<int32_t>()[s] == 0) {
        seen.insert(batch->target_BS.data<int32_t>()[s] - 100);
      }
    }
  }
  std::vector<int32_t> all(50);
  std::iota(all.begin(), all.end(), 0);
  EXPECT_TRUE(std::equal(seen.begin(), seen.end(), all.begin(), all.end()));
  EXPECT_EQ(kind_and_error_of([&] { open_packed(write_tokens(dir / "b.tok", {}), 8); }),
            "data: " + (dir / "b.tok") + ": has no tokens");
}

}  // namespace
}  // namespace moiety::data
