// Arrays of quantized tensors: names, sizes by hand, and checks of views.
#include "moiety/formats/quantized.h"

#include <algorithm>
#include <string>

#include <gtest/gtest.h>

namespace moiety {
namespace {

std::string shape(const ArraySpec& a) {
  if (a.dims == 0) return "-";
  std::string out = name(a.dtype);
  for (int d = 0; d < a.dims; ++d) out += " " + std::to_string(a.sizes[static_cast<size_t>(d)]);
  return out;
}
std::string shapes(const QuantizedSizes& s) {
  return shape(s.row_data) + ", " + shape(s.row_scales) + ", " + shape(s.col_data) + ", " +
         shape(s.col_scales) + ", " + shape(s.amax);
}

TEST(Quantized, NamesOfFormats) {
  for (int f = 0; f <= static_cast<int>(Format::kNvfp4Tile16); ++f) {
    EXPECT_EQ(format_of(name(static_cast<Format>(f))), static_cast<Format>(f));
  }
  EXPECT_EQ(format_of("fp8"), std::nullopt);
}

TEST(Quantized, SizesOfRaggedMatrices) {
  const auto of = [](Format f, Directions d) {
    return shapes(quantized_sizes(QuantSpec::of(f), 130, 35, d));
  };
  const Directions both{true, true}, col{false, true};
  EXPECT_EQ(of(Format::kFp8Tensor, both), "e4m3 130 35, -, e4m3 35 130, -, float32 2");
  EXPECT_EQ(of(Format::kFp8Block1x128, both),
            "e4m3 130 35, float32 130 1, e4m3 35 130, float32 35 2, -");
  EXPECT_EQ(of(Format::kFp8Block128x128, col), "-, float32 2 1, e4m3 35 130, -, -");
  EXPECT_EQ(of(Format::kMxfp8, both), "e4m3 130 35, ue8m0 130 2, e4m3 130 35, ue8m0 5 35, -");
  EXPECT_EQ(of(Format::kMxfp8Tile32, col), "e4m3 130 35, ue8m0 5 2, -, -, -");
  EXPECT_EQ(of(Format::kNvfp4, both),
            "uint8 130 24, e4m3 130 3, uint8 35 72, e4m3 35 9, float32 2");
  EXPECT_EQ(of(Format::kNvfp4Tile16, both), "uint8 130 24, e4m3 9 3, uint8 35 72, -, float32 2");
}

TEST(Quantized, GroupedColumnsHoldEverySplit) {
  // The worst split of a capacity: as many groups as can be just past a multiple of 128.
  for (int64_t capacity : {0, 1, 127, 128, 129, 130, 1000}) {
    for (int64_t experts : {0, 1, 2, 7, 2000}) {
      int64_t rest = capacity, columns = 0;
      for (int64_t e = experts; e > 0 && rest > 0; --e) {
        const int64_t rows =
            e == 1 || rest <= e ? (e == 1 ? rest : 1) : std::min<int64_t>(129, rest - (e - 1));
        columns += (rows + 127) / 128 * 128;
        rest -= rows;
      }
      EXPECT_GE(grouped_columns(capacity, experts), columns) << capacity << " " << experts;
      EXPECT_EQ(grouped_columns(capacity, experts) % 128, 0);
    }
  }
  EXPECT_EQ(grouped_columns(130, 2), 384);
  EXPECT_EQ(grouped_columns(129, 1), 256);
  EXPECT_EQ(grouped_columns(5, 100), 5 * 128);
}

TEST(Quantized, TensorOwnsTheArraysOfItsSizes) {
  const QuantizedTensor t(QuantSpec::of(Format::kNvfp4), 17, 33, {true, true});
  check_quantized("test", t);
  EXPECT_EQ(t.view().flags.numel(), 1);
  for (const TensorView* view : {&t.view().row_data, &t.view().row_scales, &t.view().col_data,
                                 &t.view().col_scales, &t.view().amax, &t.view().flags}) {
    EXPECT_TRUE(view->defined());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(view->raw()) % 64, 0u);
  }
}

TEST(Quantized, ChecksNameTheArray) {
  const QuantizedTensor t(QuantSpec::of(Format::kMxfp8Tile32), 64, 64, {true, true});
  QuantizedView view = t;
  view.col_data = view.row_data;
  try {
    check_quantized("op", view);
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("op: col_data is e4m3[64, 64], but mxfp8_tile32 has no"),
              std::string::npos)
        << e.what();
  }
}

}  // namespace
}  // namespace moiety
