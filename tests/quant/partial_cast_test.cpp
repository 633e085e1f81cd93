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
#include "moiety/quant/partial_cast_plan.h"
#include "moiety/quant/quantize.h"
#include "moiety/quant/scale_math.h"
#include "tests/quant/partial_cast_harness.h"

namespace moiety::quant {
namespace {

struct Kind {
  Format format;
  DType element;
  bool col = false, delayed = false, pow2 = false;
};
const std::vector<Kind> kKinds = {
    {Format::kFp8Tensor, DType::kE4M3},
    {Format::kFp8Tensor, DType::kE5M2, false, false, true},
    {Format::kFp8Tensor, DType::kE4M3, false, true},
    {Format::kFp8Block1x128, DType::kE4M3, false, false, true},
    {Format::kFp8Block1x128, DType::kE5M2},
    {Format::kFp8Block128x128, DType::kE4M3, false, false, true},
    {Format::kFp8Block128x128, DType::kE5M2},
    {Format::kMxfp8, DType::kE4M3},
    {Format::kMxfp8, DType::kE4M3, true},
    {Format::kMxfp8, DType::kE5M2, true},
    {Format::kMxfp8Tile32, DType::kE4M3},
    {Format::kMxfp8Tile32, DType::kE5M2},
    {Format::kNvfp4, DType::kE2M1},
    {Format::kNvfp4Tile16, DType::kE2M1},
};

PartialWeight make(const Kind& kind, int64_t rows, int64_t cols, std::vector<int64_t> cuts,
                   uint32_t seed = 1) {
  PartialWeight w;
  w.spec = QuantSpec::of(kind.format);
  w.spec.element = kind.element;
  w.spec.pow2_scales = kind.pow2;
  w.rows = rows;
  w.cols = cols;
  w.cuts = std::move(cuts);
  w.col = kind.col;
  w.delayed = kind.delayed;
  w.seed = seed;
  return w;
}

// Both implementations, and the fast one in shard-only buffers.
std::string run_all(const std::vector<PartialWeight>& weights, bool aligned = false) {
  return run_partial_cast(weights, {{.aligned = aligned},
                                    {.aligned = aligned, .shard_only = true},
                                    {.aligned = aligned, .reference = true}});
}

TEST(PartialCast, EvenAndRandomShardsEqualQuantize) {
  for (const Kind& kind : kKinds) {
    for (const Shape s : {Shape{1, 1}, {17, 33}, {48, 112}, {64, 80}, {130, 129}, {33, 1100}}) {
      for (const int ranks : {1, 2, 3, 5, 8}) {
        const int64_t n = s.rows * s.cols;
        PartialWeight w = make(kind, s.rows, s.cols, even_cuts(n, ranks));
        EXPECT_EQ(run_all({w}), "");
        w.cuts = random_cuts(n, ranks, static_cast<uint64_t>(n + ranks));
        EXPECT_EQ(run_all({w}), "");
      }
    }
  }
}

TEST(PartialCast, MastersAndRoundingThroughBf16) {
  for (const Kind& kind : kKinds) {
    for (const DType master : {DType::kFloat32, DType::kBFloat16}) {
      for (const bool through : {false, true}) {
        for (const Data data : kAllData) {
          PartialWeight w =
              make(kind, 45, 147, random_cuts(45 * 147, 3, static_cast<uint64_t>(data)));
          w.spec.through_bf16 = through;
          w.master = master;
          w.data = data;
          EXPECT_EQ(run_all({w}), "");
        }
      }
    }
  }
}

TEST(PartialCast, OddBoundaries) {
  struct Case {
    int64_t rows, cols;
    std::vector<int64_t> cuts;
  };
  const std::vector<Case> cases = {
      {32, 64, {0, 31, 34, 2048}},   // 3 elements from 31 on
      {64, 64, {0, 1, 4095, 4096}},  // 4094 elements from 1 on
      {16, 16, {0, 1, 256}},         // starts 1, 3, 15
      {16, 16, {0, 3, 256}},
      {16, 16, {0, 15, 256}},
      {1, 16, {0, 15, 16}},              // the last nibble of a row alone
      {3, 17, {0, 16, 17, 18, 34, 51}},  // an odd row: its last element brings pads
      {5, 1, {0, 1, 2, 5}},
      {40, 40, {0, 165, 166, 1600}},  // one element, inside a tile
      {40, 40, {0, 165, 203, 1600}},  // inside one row, both nibbles at the ends shared
      {7, 13, {0, 5, 6, 7, 8, 9, 10, 11, 91}},
      {256, 40, {0, 39, 41, 10240}},  // the end of a row and the beginning of the next
      {3, 2050, {0, 2049, 2051, 6150}},
  };
  for (const Kind& kind : kKinds) {
    for (const Case& c : cases) EXPECT_EQ(run_all({make(kind, c.rows, c.cols, c.cuts)}), "");
  }
}

TEST(PartialCast, EmptyRanksAndEmptyTensors) {
  for (const Kind& kind : kKinds) {
    EXPECT_EQ(run_all({make(kind, 20, 50, {0, 0, 333, 333, 333, 1000, 1000})}), "");
    EXPECT_EQ(run_all({make(kind, 20, 50, {0, 0, 1000})}), "");
    EXPECT_EQ(run_all({make(kind, 0, 50, {0, 0, 0})}), "");
    EXPECT_EQ(run_all({make(kind, 20, 0, {0, 0, 0})}), "");
  }
}

// The NaN lies with one rank; the others must give NaN for their part of the block or tensor.
TEST(PartialCast, NanOfOneRankReachesAll) {
  for (const Kind& kind : kKinds) {
    for (const Data data : {Data::kOneNan, Data::kOneInf}) {
      for (uint32_t seed = 1; seed <= 5; ++seed) {
        PartialWeight w = make(kind, 40, 200, random_cuts(8000, 8, seed), seed);
        w.data = data;
        EXPECT_EQ(run_all({w}), "");
      }
    }
  }
}

TEST(PartialCast, AlignedShardsEqualQuantize) {
  for (const Kind& kind : kKinds) {
    const int64_t block = kind.col ? 32 : block_shape(kind.format).rows;
    for (const Shape s : {Shape{300, 75}, {256, 128}, {7, 40}}) {
      const int64_t unit = std::max<int64_t>(block, 1) * s.cols;
      for (const int ranks : {1, 2, 3, 5}) {
        std::vector<int64_t> cuts = even_cuts(s.rows * s.cols, ranks);
        for (int r = 1; r < ranks; ++r) cuts[r] = cuts[r] / unit * unit;
        for (const Data data : {Data::kNormal, Data::kOneNan}) {
          PartialWeight w = make(kind, s.rows, s.cols, cuts);
          w.data = data;
          EXPECT_EQ(run_all({w}, true), "");
        }
      }
    }
  }
}

std::vector<PartialWeight> mixed_weights(int count, int ranks, uint64_t seed) {
  std::vector<PartialWeight> out;
  for (int i = 0; i < count; ++i) {
    const uint64_t z = mix(seed, i);
    const auto rows = static_cast<int64_t>(z % 70), cols = static_cast<int64_t>((z >> 8) % 150);
    PartialWeight w = make(kKinds[(z >> 16) % kKinds.size()], rows, cols,
                           random_cuts(rows * cols, ranks, z), static_cast<uint32_t>(z));
    w.master = z >> 20 & 1 ? DType::kFloat32 : DType::kBFloat16;
    w.spec.through_bf16 = (z >> 21 & 1) != 0;
    w.data = kAllData[(z >> 24) % std::size(kAllData)];
    out.push_back(std::move(w));
  }
  return out;
}

// Each must equal its own quantize(), so many together equal one by one.
TEST(PartialCast, ManyMixedTensorsInOneCall) {
  const std::vector<PartialWeight> weights = mixed_weights(300, 3, 9);
  EXPECT_EQ(run_all(weights), "");
}

// The scale words that a rank's phases exchange, as the caller sees them.
TEST(PartialCast, BytesOfMxfp8AreTheBytesOfTheMaxima) {
  const int64_t rows = 40, cols = 70, ranks = 3;
  PartialWeight w =
      make({Format::kMxfp8, DType::kE4M3, true}, rows, cols, random_cuts(rows * cols, ranks, 5));
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
  for (const Kind& kind :
       {Kind{Format::kNvfp4Tile16, DType::kE2M1}, Kind{Format::kFp8Tensor, DType::kE4M3}}) {
    PartialWeight w = make(kind, rows, cols, {});
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
      make({Format::kNvfp4Tile16, DType::kE2M1}, 500, 1300, random_cuts(500 * 1300, 2, 3));
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
  for (const Kind& kind : kKinds) {
    PartialWeight w = make(kind, 40, 70, random_cuts(2800, 2, 3));
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

// Random formats, shapes, cuts, data and options, for as many seconds as MOIETY_FUZZ_SECONDS says.
TEST(PartialCast, Fuzz) {
  const char* seconds = std::getenv("MOIETY_FUZZ_SECONDS");
  const char* first = std::getenv("MOIETY_FUZZ_SEED");
  const auto limit = std::chrono::duration<double>(seconds ? std::atof(seconds) : 2.0);
  const auto begin = std::chrono::steady_clock::now();
  uint64_t seed = first ? std::strtoull(first, nullptr, 10) : 1;
  int64_t cases = 0;
  for (; std::chrono::steady_clock::now() - begin < limit; ++seed) {
    const auto dice = [&](uint64_t which, uint64_t sides) {
      return mix(seed, 1000 + which) % sides;
    };
    const int ranks = 1 + static_cast<int>(dice(0, 8));
    std::vector<PartialWeight> weights;
    const bool aligned = dice(1, 4) == 0;
    for (uint64_t i = 0; i < 1 + dice(2, 4); ++i) {
      const Kind& kind = kKinds[dice(10 * i + 10, kKinds.size())];
      const int64_t rows =
          dice(10 * i + 11, 5) == 0 ? dice(10 * i + 12, 600) : dice(10 * i + 12, 70);
      const int64_t cols =
          dice(10 * i + 13, 8) == 0 ? dice(10 * i + 14, 2500) : dice(10 * i + 14, 200);
      PartialWeight w = make(kind, rows, cols, random_cuts(rows * cols, ranks, mix(seed, i)),
                             static_cast<uint32_t>(mix(seed, 100 + i)));
      if (aligned) {
        const int64_t unit =
            std::max<int64_t>(kind.col ? 32 : block_shape(kind.format).rows, 1) * cols;
        for (int r = 1; r < ranks && unit > 0; ++r) w.cuts[r] = w.cuts[r] / unit * unit;
      }
      const uint64_t options = dice(10 * i + 15, 1 << 16);
      w.master = options & 1 ? DType::kFloat32 : DType::kBFloat16;
      w.spec.through_bf16 = (options & 2) != 0;
      w.data = kAllData[(options >> 2) % std::size(kAllData)];
      const bool floor = is_fp8_block(kind.format) || kind.format == Format::kFp8Tensor;
      if (floor && (options >> 8 & 3) == 0) w.spec.amax_floor = 0x1p-6f;
      weights.push_back(std::move(w));
    }
    const PartialRun run{aligned, dice(3, 2) == 0, dice(4, 4) == 0};
    ASSERT_EQ(run_partial_cast(weights, {run}), "") << "seed " << seed;
    cases += static_cast<int64_t>(weights.size());
  }
  RecordProperty("cases", static_cast<int>(cases));
  std::printf("%lld weights cast, next seed %llu\n", static_cast<long long>(cases),
              static_cast<unsigned long long>(seed));
}

}  // namespace
}  // namespace moiety::quant
