#include "moiety/quant/partial_cast.h"

#include <bit>
#include <chrono>
#include <cstdlib>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <gtest/gtest.h>

#include "moiety/base/buffer.h"
#include "moiety/base/parallel.h"
#include "moiety/quant/partial_cast/partial_cast_plan.h"
#include "moiety/quant/quantize.h"
#include "moiety/quant/scale_math.h"
#include "tests/quant/partial_cast_cases.h"

namespace moiety::quant {
namespace {

// Both implementations, and the fast one in shard-only buffers.
std::string run_all(const std::vector<PartialWeight>& weights, bool aligned = false) {
  return run_partial_cast(weights, {{.aligned = aligned},
                                    {.aligned = aligned, .shard_only = true},
                                    {.aligned = aligned, .reference = true}});
}

void expect_all(const PartialProblems& problems) {
  for (const PartialProblem& p : problems) EXPECT_EQ(run_all(p.weights, p.aligned), "");
}

TEST(PartialCast, EvenAndRandomShardsEqualQuantize) { expect_all(even_and_random_shards()); }
TEST(PartialCast, MastersAndRoundingThroughBf16) { expect_all(masters_and_data()); }
TEST(PartialCast, OddBoundaries) { expect_all(odd_boundaries()); }
TEST(PartialCast, EmptyRanksAndEmptyTensors) { expect_all(empty_ranks_and_tensors()); }
TEST(PartialCast, NanOfOneRankReachesAll) { expect_all(nan_of_one_rank()); }
TEST(PartialCast, AlignedShardsEqualQuantize) { expect_all(aligned_shards()); }

// Each must equal its own quantize(), so many together equal one by one.
TEST(PartialCast, ManyMixedTensorsInOneCall) { EXPECT_EQ(run_all(mixed_weights(300, 3, 9)), ""); }

// The scale words that a rank's phases exchange, as the caller sees them.
TEST(PartialCast, BytesOfMxfp8AreTheBytesOfTheMaxima) {
  const int64_t rows = 40, cols = 70, ranks = 3;
  PartialWeight w = make_weight({Format::kMxfp8, DType::kE4M3, true}, rows, cols,
                                random_cuts(rows * cols, ranks, 5));
  w.data = Data::kHugeAndTiny;
  w.spec.through_bf16 = false;
  const Tensor elements = make_elements(w);
  std::vector<Tensor> buffers;
  std::vector<std::byte*> pointers;
  std::vector<PartialReduction> ranges;
  for (int r = 0; r < ranks; ++r) {
    const int64_t start = w.cuts[r], end = w.cuts[r + 1];
    const PartialCastItem item{w.spec, rows, cols, start, end, true, false};
    const PartialCastPlan plan(std::span(&item, 1), false);
    const QuantizedTensor out(w.spec, rows, cols, {.row = true, .col = true});
    PartialCastArrays arrays{
        TensorView(elements.data<float>() + start, DType::kFloat32, {end - start}), out};
    const PartialCastTable table(plan, std::span(&arrays, 1));
    buffers.emplace_back(DType::kUInt8, std::initializer_list<int64_t>{plan.reduction_bytes()});
    partial_amax(plan, table, buffers.back(), Stream());
    pointers.push_back(static_cast<std::byte*>(buffers.back().view().raw()));
    ranges.assign(plan.reductions().begin(), plan.reductions().end());
  }
  reduce_max(ranges, PartialReduction::Over::kShard, pointers);
  // The same from int32 maxima of the blocks of the whole.
  const auto expect_byte = [&](int64_t at, int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
    uint32_t amax = 0;
    for (int64_t r = r0; r < std::min(r1, rows); ++r) {
      for (int64_t c = c0; c < std::min(c1, cols); ++c) {
        amax = std::max(amax, abs_bits(elements.data<float>()[r * cols + c]));
      }
    }
    EXPECT_EQ(static_cast<uint8_t>(pointers[0][at]), mxfp8_scale<E4M3>(std::bit_cast<float>(amax)));
  };
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t b = 0; b < 3; ++b) expect_byte(r * 3 + b, r, r + 1, 32 * b, 32 * b + 32);
  }
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t c = 0; c < cols; ++c) {
      expect_byte(128 + b * cols + c, 32 * b, 32 * b + 32, c, c + 1);
    }
  }
}

// A weight cut by rows over two groups (each has a tensor of half the rows), each half owned by two
// ranks: tensor words go over all four, block words over two.
TEST(PartialCast, TensorWordsGoOverAllHoldersOfTheUncutTensor) {
  const int64_t rows = 96, cols = 56, half = rows / 2 * cols;
  for (const PartialKind& kind : {PartialKind{Format::kNvfp4Tile16, DType::kE2M1},
                                  PartialKind{Format::kFp8Tensor, DType::kE4M3}}) {
    PartialWeight w = make_weight(kind, rows, cols, {});
    w.spec.through_bf16 = false;
    const Tensor elements = make_elements(w);
    const QuantizedTensor whole(w.spec, rows, cols, {.row = true});
    quantize(elements, whole, {}, Stream());

    std::vector<std::unique_ptr<PartialCastPlan>> plans;
    std::vector<std::unique_ptr<QuantizedTensor>> outs;
    std::vector<PartialCastTable> tables;
    std::vector<Tensor> buffers;
    std::vector<std::byte*> pointers;
    for (int rank = 0; rank < 4; ++rank) {
      const int64_t cut = 1001, start = rank % 2 ? cut : 0, end = rank % 2 ? half : cut;
      const PartialCastItem item{w.spec, rows / 2, cols, start, end, false, false};
      plans.push_back(std::make_unique<PartialCastPlan>(std::span(&item, 1), false));
      outs.push_back(
          std::make_unique<QuantizedTensor>(w.spec, rows / 2, cols, Directions{.row = true}));
      const PartialCastArrays arrays{TensorView(elements.data<float>() + rank / 2 * half + start,
                                                DType::kFloat32, {end - start}),
                                     *outs.back()};
      tables.emplace_back(*plans.back(), std::span(&arrays, 1));
      buffers.emplace_back(DType::kUInt8,
                           std::initializer_list<int64_t>{plans.back()->reduction_bytes()});
      partial_amax(*plans.back(), tables.back(), buffers.back(), Stream());
      pointers.push_back(static_cast<std::byte*>(buffers.back().view().raw()));
    }
    const auto ranges = plans[0]->reductions();
    reduce_max(ranges, PartialReduction::Over::kTensor, pointers);
    for (const int group : {0, 2}) {
      reduce_max(ranges, PartialReduction::Over::kShard, std::span(pointers).subspan(group, 2));
    }
    const QuantizedView& want = whole;
    const int64_t scale_bytes =
        want.row_scales.defined() ? want.row_scales.bytes() / 2 : 0;  // of half the rows
    for (int rank = 0; rank < 4; ++rank) {
      partial_cast(*plans[rank], tables[rank], buffers[rank], Stream());
      const QuantizedView& got = *outs[rank];
      EXPECT_EQ(std::memcmp(got.tensor_scale.raw(), want.tensor_scale.raw(), 4), 0);
      if (scale_bytes == 0) continue;
      const auto* scales = static_cast<const uint8_t*>(want.row_scales.raw());
      EXPECT_EQ(std::memcmp(got.row_scales.raw(), scales + rank / 2 * scale_bytes, scale_bytes), 0);
    }
  }
}

TEST(PartialCast, ThreadsDoNotChangeBits) {
  const std::vector<PartialWeight> weights = mixed_weights(20, 2, 4);
  PartialWeight large =
      make_weight({Format::kNvfp4Tile16, DType::kE2M1}, 500, 1300, random_cuts(500 * 1300, 2, 3));
  PartialWeight flat = large;
  flat.spec = QuantSpec::of(Format::kFp8Tensor);
  std::vector<PartialWeight> all = weights;
  all.push_back(large);
  all.push_back(flat);
  EXPECT_EQ(run_partial_cast(all, {{.threads = 1}, {.threads = 2}, {.threads = 5}}), "");
}

#if defined(__x86_64__)
TEST(PartialCast, FlushModesOfTheCallerChangeNothing) {
  std::vector<PartialWeight> weights;
  for (const PartialKind& kind : kPartialKinds) {
    PartialWeight w = make_weight(kind, 40, 70, random_cuts(2800, 2, 3));
    w.data = Data::kSubnormalAmax;
    w.spec.through_bf16 = false;
    weights.push_back(w);
  }
  const unsigned before = _mm_getcsr();
  const unsigned flushing = before | 0x8040u | 0x2000u;  // FTZ, DAZ, rounding down
  _mm_setcsr(flushing);
  const std::string bad = run_partial_cast(weights, {{.threads = 2}, {.reference = true}});
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  EXPECT_EQ(bad, "");
  EXPECT_EQ(after & 0xFFC0u, flushing & 0xFFC0u);
}
#endif

TEST(PartialCast, ArgumentsAreChecked) {
  const QuantSpec spec = QuantSpec::of(Format::kNvfp4Tile16);
  const PartialCastItem item{spec, 32, 48, 5, 100, false, false};
  const PartialCastPlan plan(std::span(&item, 1), false);
  const QuantizedTensor out(spec, 32, 48, {.row = true});
  const Tensor master(DType::kFloat32, {95});
  const auto expect_error = [&](PartialCastArrays arrays, const char* what) {
    try {
      const PartialCastTable table(plan, std::span(&arrays, 1));
      ADD_FAILURE() << what;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(what), std::string::npos) << e.what();
    }
  };
  expect_error({Tensor(DType::kFloat32, {94}).view(), out}, "master is float32[94]");
  expect_error({Tensor(DType::kInt32, {95}).view(), out}, "master 0 is int32[95]");
  PartialCastArrays arrays{master, out};
  arrays.out.spec.through_bf16 = false;
  expect_error(arrays, "the plan's item");
  arrays = {master, out};
  arrays.out.row_scales = {};
  expect_error(arrays, "item 0 (nvfp4_tile16) has no row_scales");
  arrays = {master, out};
  arrays.out.amax = {};
  expect_error(arrays, "has no amax");
  arrays = {master, out, true};
  expect_error(arrays, "row_data of a shard is uint8[32, 24], expected 48 bytes");
  const DelayedScaling delayed;
  arrays = {master, out, false, &delayed};
  expect_error(arrays, "item 0 is not planned as delayed");

  arrays = {master, out};
  const PartialCastTable table(plan, std::span(&arrays, 1));
  const PartialCastPlan other(std::span(&item, 1), false);
  Tensor reduction(DType::kUInt8, {plan.reduction_bytes()});
  EXPECT_THROW(partial_amax(other, table, reduction, Stream()), Error);
  EXPECT_THROW(partial_cast(plan, table, Tensor(DType::kUInt8, {1}), Stream()), Error);
}

// Random problems, for as many seconds as MOIETY_FUZZ_SECONDS says.
TEST(PartialCast, Fuzz) {
  const char* seconds = std::getenv("MOIETY_FUZZ_SECONDS");
  const char* first = std::getenv("MOIETY_FUZZ_SEED");
  const auto limit = std::chrono::duration<double>(seconds ? std::atof(seconds) : 2.0);
  const auto begin = std::chrono::steady_clock::now();
  uint64_t seed = first ? std::strtoull(first, nullptr, 10) : 1;
  int64_t cases = 0;
  for (; std::chrono::steady_clock::now() - begin < limit; ++seed) {
    const PartialProblem problem = random_problem(seed);
    const PartialRun run{problem.aligned, mix(seed, 1003) % 2 == 0, mix(seed, 1004) % 4 == 0};
    ASSERT_EQ(run_partial_cast(problem.weights, {run}), "") << "seed " << seed;
    cases += std::ssize(problem.weights);
  }
  RecordProperty("cases", static_cast<int>(cases));
  std::printf("%lld weights cast, next seed %llu\n", static_cast<long long>(cases),
              static_cast<unsigned long long>(seed));
}

}  // namespace
}  // namespace moiety::quant
