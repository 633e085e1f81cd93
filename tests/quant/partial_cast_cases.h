// Partial casts that tests of every device run: formats, shapes, splits, data, options.
#pragma once

#include <algorithm>
#include <iterator>

#include "moiety/quant/partial_cast.h"
#include "tests/quant/partial_cast_harness.h"

namespace moiety::quant {

struct PartialKind {
  Format format;
  DType element;
  bool col = false, delayed = false, pow2 = false;

  // Rows of a block, of both directions if there are two.
  int64_t block_rows() const { return col ? 32 : std::max(block_shape(format).rows, 1); }
};
inline const std::vector<PartialKind> kPartialKinds = {
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

inline PartialWeight make_weight(const PartialKind& kind, int64_t rows, int64_t cols,
                                 std::vector<int64_t> cuts, uint32_t seed = 1) {
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

// Weights that are cast in one call.
struct PartialProblem {
  std::vector<PartialWeight> weights;
  bool aligned = false;
};
using PartialProblems = std::vector<PartialProblem>;

inline PartialProblems even_and_random_shards() {
  PartialProblems out;
  for (const PartialKind& kind : kPartialKinds) {
    uint32_t seed = 0;
    for (const Shape s :
         {Shape{1, 1}, {17, 33}, {48, 112}, {64, 80}, {130, 129}, {33, 1100}, {160, 256}}) {
      for (const int ranks : {1, 2, 3, 5, 8}) {
        const int64_t n = s.rows * s.cols;
        out.push_back({{make_weight(kind, s.rows, s.cols, even_cuts(n, ranks), seed++)}});
        const auto cuts = random_cuts(n, ranks, static_cast<uint64_t>(n + ranks));
        out.push_back({{make_weight(kind, s.rows, s.cols, cuts, seed++)}});
      }
    }
  }
  return out;
}

// Float32 and bf16 masters, rounded to bf16 first or not, of all kinds of data.
inline PartialProblems masters_and_data() {
  PartialProblems out;
  for (const PartialKind& kind : kPartialKinds) {
    for (const DType master : {DType::kFloat32, DType::kBFloat16}) {
      for (const bool through : {false, true}) {
        for (const Data data : kAllData) {
          const auto cuts = random_cuts(45 * 147, 3, static_cast<uint64_t>(data));
          PartialWeight w = make_weight(kind, 45, 147, cuts);
          w.spec.through_bf16 = through;
          w.master = master;
          w.data = data;
          out.push_back({{w}});
        }
      }
    }
  }
  return out;
}

inline PartialProblems odd_boundaries() {
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
  PartialProblems out;
  for (const PartialKind& kind : kPartialKinds) {
    for (const Case& c : cases) out.push_back({{make_weight(kind, c.rows, c.cols, c.cuts)}});
  }
  return out;
}

inline PartialProblems empty_ranks_and_tensors() {
  PartialProblems out;
  for (const PartialKind& kind : kPartialKinds) {
    out.push_back({{make_weight(kind, 20, 50, {0, 0, 333, 333, 333, 1000, 1000})}});
    out.push_back({{make_weight(kind, 20, 50, {0, 0, 1000})}});
    out.push_back({{make_weight(kind, 0, 50, {0, 0, 0})}});
    out.push_back({{make_weight(kind, 20, 0, {0, 0, 0})}});
  }
  return out;
}

// The NaN lies with one rank; the others must give NaN for their part of the block or tensor.
inline PartialProblems nan_of_one_rank() {
  PartialProblems out;
  for (const PartialKind& kind : kPartialKinds) {
    for (const Data data : {Data::kOneNan, Data::kOneInf}) {
      for (uint32_t seed = 1; seed <= 5; ++seed) {
        PartialWeight w = make_weight(kind, 40, 200, random_cuts(8000, 8, seed), seed);
        w.data = data;
        out.push_back({{w}});
      }
    }
  }
  return out;
}

// Moves the boundaries of a weight's shards to whole rows of blocks.
inline void align_cuts(const PartialKind& kind, PartialWeight& w) {
  const int64_t unit = kind.block_rows() * w.cols;
  for (size_t r = 1; r + 1 < w.cuts.size() && unit > 0; ++r) w.cuts[r] = w.cuts[r] / unit * unit;
}

inline PartialProblems aligned_shards() {
  PartialProblems out;
  for (const PartialKind& kind : kPartialKinds) {
    for (const Shape s : {Shape{300, 75}, {256, 128}, {7, 40}}) {
      for (const int ranks : {1, 2, 3, 5}) {
        for (const Data data : {Data::kNormal, Data::kOneNan}) {
          PartialWeight w = make_weight(kind, s.rows, s.cols, even_cuts(s.rows * s.cols, ranks));
          align_cuts(kind, w);
          w.data = data;
          out.push_back({{w}, true});
        }
      }
    }
  }
  return out;
}

inline std::vector<PartialWeight> mixed_weights(int count, int ranks, uint64_t seed) {
  std::vector<PartialWeight> out;
  for (int i = 0; i < count; ++i) {
    const uint64_t z = mix(seed, i);
    const auto rows = static_cast<int64_t>(z % 70), cols = static_cast<int64_t>((z >> 8) % 150);
    PartialWeight w = make_weight(kPartialKinds[(z >> 16) % kPartialKinds.size()], rows, cols,
                                  random_cuts(rows * cols, ranks, z), static_cast<uint32_t>(z));
    w.master = z >> 20 & 1 ? DType::kFloat32 : DType::kBFloat16;
    w.spec.through_bf16 = (z >> 21 & 1) != 0;
    w.data = kAllData[(z >> 24) % std::size(kAllData)];
    out.push_back(std::move(w));
  }
  return out;
}

// Random formats, shapes, cuts, data and options.
inline PartialProblem random_problem(uint64_t seed) {
  const auto dice = [&](uint64_t which, uint64_t sides) { return mix(seed, 1000 + which) % sides; };
  const int ranks = 1 + static_cast<int>(dice(0, 8));
  PartialProblem out;
  out.aligned = dice(1, 4) == 0;
  for (uint64_t i = 0; i < 1 + dice(2, 4); ++i) {
    const PartialKind& kind = kPartialKinds[dice(10 * i + 10, kPartialKinds.size())];
    const uint64_t options = dice(10 * i + 15, 1 << 16);
    const int64_t rows = dice(10 * i + 11, 5) == 0 ? dice(10 * i + 12, 600) : dice(10 * i + 12, 70);
    int64_t cols = dice(10 * i + 13, 8) == 0 ? dice(10 * i + 14, 2500) : dice(10 * i + 14, 200);
    // Regular splits are those of parameters; others are those that nobody would make.
    const bool regular = (options >> 10 & 3) == 0;
    if (regular) cols = cols / 16 * 16;
    PartialWeight w = make_weight(kind, rows, cols, random_cuts(rows * cols, ranks, mix(seed, i)),
                                  static_cast<uint32_t>(mix(seed, 100 + i)));
    if (regular) {
      w.seed = w.seed / 16 * 16;
      for (size_t r = 1; r + 1 < w.cuts.size(); ++r) w.cuts[r] = w.cuts[r] / 128 * 128;
    }
    if (out.aligned) align_cuts(kind, w);
    w.master = options & 1 ? DType::kFloat32 : DType::kBFloat16;
    w.spec.through_bf16 = (options & 2) != 0;
    w.data = kAllData[(options >> 2) % std::size(kAllData)];
    const bool floor = is_fp8_block(kind.format) || kind.format == Format::kFp8Tensor;
    if (floor && (options >> 8 & 3) == 0) w.spec.amax_floor = 0x1p-6f;
    out.weights.push_back(std::move(w));
  }
  return out;
}

}  // namespace moiety::quant
