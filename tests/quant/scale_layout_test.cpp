// Layouts of scales: places by hand, pads, round trips, and the fast path against the reference.
#include "moiety/quant/scale_layout.h"

#include "moiety/base/parallel.h"
#include "moiety/quant/scale_layout_job.h"
#include "tests/quant/cases.h"
#include "tests/quant/layout_cases.h"

namespace moiety::quant {
namespace {

Tensor array(const ArraySpec& a) {
  Tensor out(a.dtype, std::span(a.sizes.data(), static_cast<size_t>(a.dims)));
  std::memset(out.view().raw(), 0xA5, static_cast<size_t>(out.view().bytes()));
  return out;
}

uint8_t* raw(const TensorView& x) { return static_cast<uint8_t*>(x.raw()); }

TEST(ScaleLayout, SwizzledPlaces) {
  struct Place {
    int64_t r, c, at;
  };
  for (const Place& p : {Place{0, 3, 3}, Place{1, 0, 16}, Place{31, 0, 496}, Place{32, 0, 4},
                         Place{96, 0, 12}, Place{127, 3, 511}, Place{128, 5, 512 * 3 + 1}}) {
    const QuantizedTensor q(QuantSpec::of(Format::kMxfp8), 130, 32 * 6, {true, false});
    raw(q.view().row_scales)[p.r * 6 + p.c] = 77;
    Tensor out = array(scale_layout_size(q, Direction::kRow, ScaleLayout::kSm100Swizzled));
    ASSERT_EQ(out.view().numel(), 512 * 4);
    convert_scales(q, Direction::kRow, ScaleLayout::kSm100Swizzled, out, Stream());
    for (int64_t i = 0; i < 2048; ++i) EXPECT_EQ(raw(out)[i], i == p.at ? 77 : 0);
  }
}

// Every case with R x C scales, distinct in their bytes.
template <class Body>
void for_each_case(Body&& body) {
  const ThreadBudget budget(1);
  for (const LayoutCase& c : layout_cases()) {
    const int64_t block = block_shape(c.format).cols;
    const bool row = c.direction == Direction::kRow;
    for (const int64_t r : {1, 4, 5, 127, 129, 300}) {
      for (const int64_t n : {1, 4, 5, 127, 129, 300}) {
        if (!full_tests() && (r + n) % 3 == 1) continue;
        const int64_t along = n * block - (n % 2 ? 3 : 0);
        QuantizedSizes sizes =
            quantized_sizes(QuantSpec::of(c.format), row ? r : along, row ? along : r, {row, !row});
        sizes.row_data = sizes.col_data = {};
        const Guarded q(QuantSpec::of(c.format), row ? r : along, row ? along : r, sizes, 1);
        const TensorView& scales =
            row || is_tile(c.format) ? q.view().row_scales : q.view().col_scales;
        for (int64_t i = 0; i < scales.bytes(); ++i) {
          raw(scales)[i] = static_cast<uint8_t>(1 + i * 37 % 251);
        }
        SCOPED_TRACE(text("{} {} col={} {}x{}", name(c.format), name(c.layout), !row, r, n));
        body(c, q, scales, r, n);
      }
    }
  }
}

TEST(ScaleLayout, PutsEveryScaleInItsPlaceAndZerosElsewhere) {
  for_each_case([](const LayoutCase& c, const Guarded& q, const TensorView& scales, int64_t rows,
                   int64_t cols) {
    Tensor out = array(scale_layout_size(q, c.direction, c.layout));
    convert_scales(q, c.direction, c.layout, out, Stream());
    const int64_t width = byte_size(scales.dtype(), 1);
    const BlockShape block = block_shape(c.format);
    const bool turned =
        c.direction == Direction::kCol && (is_tile(c.format) || c.format == Format::kMxfp8);
    int64_t placed = 0;
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t k = 0; k < cols; ++k) {
        const int64_t tile_row = is_tile(c.format) ? r / block.rows : r;
        const int64_t from = turned ? k * scales.size(1) + tile_row : tile_row * cols + k;
        const int64_t quads = (cols + 3) / 4;
        const int64_t to =
            c.layout == ScaleLayout::kPadded ? r * quads * 4 + k
            : c.layout == ScaleLayout::kSm90MnMajor
                ? k * ((rows + 3) / 4 * 4) + r
                : (r / 128 * quads + k / 4) * 512 + r % 32 * 16 + r % 128 / 32 * 4 + k % 4;
        placed += std::memcmp(raw(out) + to * width, raw(scales) + from * width,
                              static_cast<size_t>(width)) == 0;
      }
    }
    EXPECT_EQ(placed, rows * cols);
    int64_t nonzero = 0;
    for (int64_t i = 0; i < out.view().bytes(); ++i) nonzero += raw(out)[i] != 0;
    EXPECT_EQ(nonzero, rows * cols * width);
  });
}

TEST(ScaleLayout, RoundTrips) {
  for_each_case(
      [](const LayoutCase& c, const Guarded& q, const TensorView& scales, int64_t, int64_t) {
        Tensor out = array(scale_layout_size(q, c.direction, c.layout));
        convert_scales(q, c.direction, c.layout, out, Stream());
        if (is_tile(c.format)) {
          EXPECT_NE(kind_and_error_of([&] {
                      compact_scales(out, c.layout, q, c.direction, Stream());
                    }).find("expanded"),
                    std::string::npos);
          return;
        }
        const std::vector<uint8_t> before(raw(scales), raw(scales) + scales.bytes());
        std::memset(raw(scales), 0, before.size());
        compact_scales(out, c.layout, q, c.direction, Stream());
        EXPECT_EQ(std::memcmp(raw(scales), before.data(), before.size()), 0);
        EXPECT_TRUE(q.guards_intact());
      });
}

TEST(ScaleLayout, FastPathEqualsReference) {
  for_each_case([](const LayoutCase& c, const Guarded& q, const TensorView& scales, int64_t rows,
                   int64_t cols) {
    Tensor fast = array(scale_layout_size(q, c.direction, c.layout));
    Tensor slow = array(scale_layout_size(q, c.direction, c.layout));
    convert_scales(q, c.direction, c.layout, fast, Stream());
    ScaleMatrix m;
    m.data = raw(scales);
    m.rows = rows;
    m.cols = cols;
    m.width = static_cast<int>(byte_size(scales.dtype(), 1));
    const bool tile = is_tile(c.format), col = c.direction == Direction::kCol;
    const bool turned = col && (tile || c.format == Format::kMxfp8);
    m.row_block = tile ? block_shape(c.format).rows : 1;
    m.row_stride = turned ? 1 : cols;
    m.col_stride = turned ? scales.size(1) : 1;
    convert_scales_reference(m, c.layout, raw(slow));
    EXPECT_TRUE(same_bits(fast, slow));
  });
}

TEST(ScaleLayout, RefusesLayoutsOfOtherScales) {
  const QuantizedTensor q(QuantSpec::of(Format::kFp8Block1x128), 4, 256, {true, true});
  EXPECT_NE(kind_and_error_of([&] {
              scale_layout_size(q, Direction::kRow, ScaleLayout::kSm100Swizzled);
            }).find("sm100_swizzled is a layout of byte scales"),
            std::string::npos);
}

TEST(Fp8BlockToMxfp8, RepeatsExponentsAndReportsTheRest) {
  struct Scale {
    uint32_t bits;
    int expected;
    bool fault;
  };
  const Scale scales[] = {
      {0x3F800000, 127, false}, {0x00800000, 1, false},   {0x00400000, 0, false},
      {0x7F000000, 254, false}, {0x7FFFFFFF, 255, false}, {0xFFC00000, 255, false},
      {0x3F800001, 255, true},  {0x00000000, 255, true},  {0x7F800000, 255, true},
      {0xBF800000, 255, true},  {0x00200000, 255, true}};
  for (const Scale& s : scales) {
    for (const Format format : {Format::kFp8Block1x128, Format::kFp8Block128x128}) {
      const Guarded q(QuantSpec::of(format), 2, 200, {true, true});
      for (int64_t i = 0; i < q.view().row_scales.numel(); ++i) {
        q.view().row_scales.data<float>()[i] = 2.0f;
      }
      q.view().row_scales.data<float>()[1] = std::bit_cast<float>(s.bits);
      Tensor out = array({DType::kUE8M0, 2, {2, 7}});
      fp8_block_to_mxfp8(q, Direction::kRow, out, Stream());
      for (int i = 0; i < 14; ++i) {
        const bool second = i % 7 >= 4 && (i < 7 || is_tile(format));
        EXPECT_EQ(raw(out)[i], second ? s.expected : 128) << i;
      }
      EXPECT_EQ(q.flag(), s.fault ? kFlagUnrepresentable : 0u);
    }
  }
  // Col of a tile: the row scales read transposed.
  const Guarded q(QuantSpec::of(Format::kFp8Block128x128), 130, 3, {false, true});
  q.view().row_scales.data<float>()[0] = 1;
  q.view().row_scales.data<float>()[1] = 4;
  Tensor out = array({DType::kUE8M0, 2, {3, 5}});
  fp8_block_to_mxfp8(q, Direction::kCol, out, Stream());
  for (int i = 0; i < 15; ++i) EXPECT_EQ(raw(out)[i], i % 5 < 4 ? 127 : 129);
}

}  // namespace
}  // namespace moiety::quant
