#include "moiety/quant/partial_cast/partial_cast_plan.h"

#include <gtest/gtest.h>

#include "tests/quant/partial_cast_harness.h"

namespace moiety::quant {
namespace {

PartialCastItem item(Format format, int64_t rows, int64_t cols, int64_t start, int64_t end,
                     bool col = false) {
  return {QuantSpec::of(format), rows, cols, start, end, col, false};
}

PartialCastPlan plan_of(std::vector<PartialCastItem> items, bool aligned = false) {
  return PartialCastPlan(items, aligned);
}

void expect_reduction(const PartialReduction& got, PartialReduction::Over over, DType dtype,
                      int64_t offset, int64_t bytes) {
  EXPECT_EQ(got.over, over);
  EXPECT_EQ(got.dtype, dtype);
  EXPECT_EQ(got.offset, offset);
  EXPECT_EQ(got.bytes, bytes);
}

void expect_words(const PartialWords& got, int64_t tensor, const PartialWords::Blocks& row,
                  const PartialWords::Blocks& col = {}) {
  EXPECT_EQ(got.tensor, tensor);
  for (const auto& [is, expected] : {std::pair{got.row, row}, {got.col, col}}) {
    EXPECT_EQ(is.offset, expected.offset);
    EXPECT_EQ(is.rows, expected.rows);
    EXPECT_EQ(is.cols, expected.cols);
  }
}

TEST(PartialCastPlan, ReductionBuffer) {
  const std::vector<PartialCastItem> items = {
      item(Format::kMxfp8, 33, 65, 0, 0, true),        // 99 row bytes, 130 col bytes
      item(Format::kFp8Tensor, 5, 7, 3, 9),            // a tensor word
      item(Format::kNvfp4Tile16, 40, 17, 0, 0),        // a tensor word, 3 x 2 tiles
      item(Format::kFp8Block128x128, 129, 128, 0, 0),  // 2 tiles
      item(Format::kMxfp8Tile32, 64, 33, 0, 0),        // 4 bytes
      item(Format::kNvfp4, 2, 20, 0, 0),               // a tensor word, 4 blocks
  };
  const PartialCastPlan plan = plan_of(items);
  expect_words(plan.words(1), 0, {});
  expect_words(plan.words(2), 4, {16, 3, 2});
  expect_words(plan.words(3), -1, {48, 2, 1});
  expect_words(plan.words(5), 8, {64, 2, 2});
  expect_words(plan.words(0), -1, {80, 33, 3}, {80 + 112, 2, 65});
  expect_words(plan.words(4), -1, {80 + 112 + 144, 2, 2});
  EXPECT_NE(error_of([&] { plan.words(6); }).find("words: item 6 of 6"), std::string::npos);
  EXPECT_EQ(plan.reduction_bytes(), 80 + 112 + 144 + 16);
  using Over = PartialReduction::Over;
  ASSERT_EQ(plan.reductions().size(), 3u);
  expect_reduction(plan.reductions()[0], Over::kTensor, DType::kInt32, 0, 16);
  expect_reduction(plan.reductions()[1], Over::kShard, DType::kInt32, 16, 64);
  expect_reduction(plan.reductions()[2], Over::kShard, DType::kUInt8, 80, 272);

  const PartialCastPlan aligned =
      plan_of({items[0], item(Format::kFp8Tensor, 5, 7, 0, 35), items[2], items[3]}, true);
  ASSERT_EQ(aligned.reductions().size(), 1u);
  expect_reduction(aligned.reductions()[0], Over::kTensor, DType::kInt32, 0, 16);
  EXPECT_TRUE(plan_of({items[0], items[3], items[4]}, true).reductions().empty());
  EXPECT_EQ(plan_of({}).reduction_bytes(), 0);
}

// A rank that owns nothing has the same buffer as one that owns everything.
TEST(PartialCastPlan, ReductionsDoNotDependOnTheRange) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    std::vector<PartialCastItem> mine, none;
    for (uint64_t i = 0; i < 10; ++i) {
      const auto rows = static_cast<int64_t>(mix(seed, 3 * i) % 300);
      const auto cols = static_cast<int64_t>(mix(seed, 3 * i + 1) % 300);
      const auto format = static_cast<Format>(mix(seed, 3 * i + 2) % 7);
      const auto cuts = random_cuts(rows * cols, 3, mix(seed, i));
      mine.push_back(item(format, rows, cols, cuts[1], cuts[2], format == Format::kMxfp8));
      none.push_back(item(format, rows, cols, 0, 0, format == Format::kMxfp8));
    }
    const PartialCastPlan a = plan_of(mine), b = plan_of(none);
    EXPECT_EQ(a.reduction_bytes(), b.reduction_bytes());
    ASSERT_EQ(a.reductions().size(), b.reductions().size());
    for (size_t i = 0; i < a.reductions().size(); ++i) {
      const PartialReduction& r = b.reductions()[i];
      expect_reduction(a.reductions()[i], r.over, r.dtype, r.offset, r.bytes);
    }
  }
}

// Tiles hold every owned element once, and no tile holds none.
TEST(PartialCastPlan, TilesCoverTheRangeAndNothingElse) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    const auto rows = static_cast<int64_t>(1 + mix(seed, 0) % 400);
    const auto cols = static_cast<int64_t>(1 + mix(seed, 1) % (seed % 2 ? 3000 : 200));
    const auto cuts = random_cuts(rows * cols, 3, seed);
    const auto format = static_cast<Format>(seed % 7);
    const PartialCastPlan plan = plan_of({item(format, rows, cols, cuts[1], cuts[2])});
    const detail::PartialItem& x = plan.impl().items[0];
    std::vector<int> seen(rows * cols);
    for (const detail::PartialTile& tile : plan.impl().tiles) {
      EXPECT_EQ(tile.row % x.band, 0);
      EXPECT_EQ(tile.col % 128, 0);
      EXPECT_LE(tile.cols, detail::kMaxTileCols);
      int64_t owned_here = 0;
      for (int64_t r = tile.row; r < tile.row + tile.rows; ++r) {
        const detail::OwnedColumns owned = detail::owned_columns(x, tile, r);
        for (int64_t c = owned.begin; c < owned.end; ++c) {
          ++seen[r * x.cols + c];
          ++owned_here;
        }
      }
      EXPECT_GT(owned_here, 0);
    }
    for (int64_t e = 0; e < rows * cols; ++e) {
      ASSERT_EQ(seen[e], e >= cuts[1] && e < cuts[2]) << "element " << e << " seed " << seed;
    }
  }
}

TEST(PartialCastPlan, WorkIsProportionalToTheShard) {
  const auto tiles = [](Format format, int64_t start, int64_t end) {
    return plan_of({item(format, 1 << 14, 1 << 14, start, end)}).impl().tiles.size();
  };
  const int64_t n = int64_t{1} << 28, begin = n / 2 + 12345;
  for (int f = 0; f < 7; ++f) {
    const auto format = static_cast<Format>(f);
    EXPECT_EQ(tiles(format, begin, begin), 0u);
    EXPECT_EQ(tiles(format, begin, begin + 1), 1u);
    EXPECT_LE(tiles(format, begin, begin + 4096), 6u);
    EXPECT_LE(tiles(format, begin, begin + n / 16), tiles(format, 0, n) / 16 + 34);
  }
}

TEST(PartialCastPlan, ShardBytes) {
  const QuantSpec fp4 = QuantSpec::of(Format::kNvfp4Tile16);
  const QuantSpec fp8 = QuantSpec::of(Format::kMxfp8);
  const auto expect_bytes = [](const QuantSpec& spec, int64_t cols, int64_t start, int64_t end,
                               int64_t first, int64_t last) {
    const ByteRange range = shard_bytes(spec, 10, cols, start, end);
    EXPECT_EQ(range.begin, first) << cols << " " << start << " " << end;
    EXPECT_EQ(range.end, last) << cols << " " << start << " " << end;
  };
  expect_bytes(fp8, 17, 5, 40, 5, 40);
  expect_bytes(fp4, 16, 0, 16, 0, 8);
  expect_bytes(fp4, 16, 1, 2, 0, 1);
  expect_bytes(fp4, 16, 15, 17, 7, 9);
  expect_bytes(fp4, 17, 0, 17, 0, 16);  // the end of the row brings its pads
  expect_bytes(fp4, 17, 0, 16, 0, 8);
  expect_bytes(fp4, 17, 16, 18, 8, 17);
  expect_bytes(fp4, 17, 34, 170, 32, 160);
  expect_bytes(fp4, 17, 170, 170, 160, 160);
  expect_bytes(fp4, 0, 0, 0, 0, 0);
  EXPECT_THROW(shard_bytes(fp4, 2, 16, 8, 33), Error);
}

TEST(PartialCastPlan, Gatherable) {
  const auto gatherable = [](Format format, int64_t cols, int64_t start, int64_t end) {
    return plan_of({item(format, 10, cols, start, end)}).gatherable(0);
  };
  EXPECT_TRUE(gatherable(Format::kFp8Tensor, 17, 3, 5));
  EXPECT_TRUE(gatherable(Format::kNvfp4, 16, 2, 36));
  EXPECT_FALSE(gatherable(Format::kNvfp4, 16, 3, 36));
  EXPECT_FALSE(gatherable(Format::kNvfp4Tile16, 16, 2, 35));
  EXPECT_TRUE(gatherable(Format::kNvfp4Tile16, 17, 17, 34));  // rows are whole bytes
  EXPECT_TRUE(gatherable(Format::kNvfp4Tile16, 17, 19, 170));
  EXPECT_FALSE(gatherable(Format::kNvfp4Tile16, 17, 18, 170));
}

TEST(PartialCastPlan, Refusals) {
  const auto expect_error = [](PartialCastItem x, bool aligned, ErrorKind kind, const char* what) {
    try {
      const PartialCastPlan plan(std::span(&x, 1), aligned);
      ADD_FAILURE() << what;
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), kind);
      EXPECT_NE(std::string(e.what()).find(what), std::string::npos) << e.what();
    }
  };
  constexpr auto kArgument = ErrorKind::kInvalidArgument;
  constexpr auto kUnsupported = ErrorKind::kUnsupported;
  expect_error(item(Format::kMxfp8, 4, 4, 0, 17), false, kArgument, "[0, 17) of 4 x 4");
  expect_error(item(Format::kMxfp8, 4, 4, 3, 2), false, kArgument, "[3, 2)");
  expect_error(item(Format::kMxfp8, -1, 4, 0, 0), false, kArgument, "-1 x 4");
  expect_error(item(Format::kNvfp4Tile16, 64, 8, 8, 128), true, kArgument, "multiples of 128");
  expect_error(item(Format::kMxfp8, 64, 8, 8, 256, true), true, kArgument, "multiples of 256");
  expect_error(item(Format::kNvfp4, 64, 8, 0, 8, true), false, kUnsupported, "transposed");
  expect_error(item(Format::kFp8Block1x128, 64, 8, 0, 8, true), false, kUnsupported, "transposed");
  expect_error(item(Format::kNvfp4Tile16, 64, 8, 0, 8, true), false, kUnsupported,
               "transpose_quantized makes its col data");
  PartialCastItem x = item(Format::kNvfp4, 64, 8, 0, 8);
  x.spec.row_scaled = true;
  expect_error(x, false, kUnsupported, "a scale for each row");
  x = item(Format::kMxfp8, 64, 8, 0, 8);
  x.spec.rounding = Rounding::kStochastic;
  expect_error(x, false, kUnsupported, "stochastic");
  x = item(Format::kMxfp8, 64, 8, 0, 8);
  x.delayed = true;
  expect_error(x, false, kArgument, "delayed");
  EXPECT_NO_THROW(plan_of({item(Format::kNvfp4Tile16, 20, 8, 128, 160)}, true));  // a ragged end
  EXPECT_NO_THROW(plan_of({item(Format::kMxfp8, 20, 8, 8, 24)}, true));
}

}  // namespace
}  // namespace moiety::quant
