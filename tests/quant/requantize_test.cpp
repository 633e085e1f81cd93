// One call makes the col operand of quantized rows: the bytes of dequantize and quantize one after
// the other, by every path of this processor.
#include "moiety/quant/requantize.h"

#include "moiety/quant/cpu_path.h"
#include "moiety/quant/dequantize.h"
#include "tests/quant/grouped_cases.h"
#include "tests/quant/requantize_cases.h"

namespace moiety::quant {
namespace {

std::string arrays_of(const QuantizedView& x) {
  std::string out;
  for (const TensorView* array :
       {&x.row_scales, &x.col_data, &x.col_scales, &x.amax, &x.tensor_scale, &x.flags}) {
    out += bytes_of(*array);
  }
  return out;
}

class Requantize : public testing::TestWithParam<SpecCase> {};
INSTANTIATE_TEST_SUITE_P(All, Requantize, testing::ValuesIn(col_cases()),
                         [](const auto& info) { return info.param.name; });

// A matrix by every path, with and without a place for the values.
void expect_same(const QuantSpec& to, const QuantSpec& from, Shape shape, Data data) {
  const Guarded rows(from, shape.rows, shape.cols, {true, false});
  quantize(Input(DType::kBFloat16, shape, data), rows, {}, Stream());
  const Tensor values(DType::kBFloat16, {shape.rows, shape.cols}),
      kept(DType::kBFloat16, {shape.rows, shape.cols});
  dequantize(rows, Direction::kRow, values, {}, Stream());
  const auto output = [&] { return Guarded(to, shape.rows, shape.cols, Directions{false, true}); };
  const Guarded expected = output();
  quantize(values, expected, test_options(), Stream());
  for (const CpuPath path : cpu_paths()) {
    const UseCpuPath use(path);
    const Guarded got = output();
    requantize_col(rows, got, test_options(), {}, Stream());
    EXPECT_EQ(arrays_of(got), arrays_of(expected))
        << name(path) << " " << name(shape) << " " << name(data) << " of " << name(from.format);
    EXPECT_TRUE(got.guards_intact());
  }
  const Guarded got = output();
  requantize_col(rows, got, test_options(), kept, Stream());
  EXPECT_EQ(arrays_of(got), arrays_of(expected));
  EXPECT_EQ(bytes_of(kept), bytes_of(values));
}

TEST_P(Requantize, HasTheBytesOfTheTwoCalls) {
  for (const QuantSpec& spec : row_specs(false)) {
    for (const Shape shape : std::vector<Shape>{{1, 1}, {17, 33}, {129, 72}, {0, 40}}) {
      expect_same(GetParam().spec, spec, shape, Data::kNormal);
    }
    for (const Data data : {Data::kOneNan, Data::kHugeAndTiny}) {
      expect_same(GetParam().spec, spec, {40, 136}, data);
    }
  }
  // Several tasks across.
  expect_same(GetParam().spec, row_specs(false)[2], {20, 2180}, Data::kNormal);
}

TEST_P(Requantize, OfGroupsHasTheBytesOfTheTwoCalls) {
  if (is_tile(GetParam().spec.format)) return;
  for (const Routing& routing : routings()) {
    if (routing.counts.size() > 128) continue;
    const Problem p(routing);
    for (const QuantSpec& spec : row_specs(true)) {
      const Guarded rows(spec, p.capacity, kCols, {true, false});
      quantize(p.input(DType::kBFloat16, Data::kNormal), rows, {}, Stream());
      const Tensor values(DType::kBFloat16, {p.capacity, kCols});
      dequantize(rows, Direction::kRow, values, {}, Stream());
      const Guarded expected = p.output(GetParam().spec, {false, true}, 0x5A);
      quantize_grouped(values, p.groups, expected, test_options(), Stream());
      for (const CpuPath path : cpu_paths()) {
        const UseCpuPath use(path);
        const Guarded got = p.output(GetParam().spec, {false, true}, 0x5A);
        requantize_col_grouped(rows, p.groups, got, test_options(), {}, Stream());
        EXPECT_EQ(arrays_of(got), arrays_of(expected))
            << name(path) << " " << routing.name << " of " << name(spec.format);
        EXPECT_TRUE(got.guards_intact());
      }
    }
  }
}

TEST(RequantizeErrors, NameTheArgument) {
  const QuantSpec mxfp8 = QuantSpec::of(Format::kMxfp8);
  const Guarded rows(mxfp8, 32, 32, {true, false}), both(mxfp8, 32, 32, {true, true}),
      other(mxfp8, 64, 32, {false, true}),
      tiles(QuantSpec::of(Format::kFp8Block128x128), 32, 32, {true, false}),
      out(mxfp8, 32, 32, {false, true});
  const auto error = [](const QuantizedView& from, const QuantizedView& to) {
    return error_of([&] { requantize_col(from, to, {}, {}, Stream()); });
  };
  EXPECT_EQ(error(tiles, out),
            "requantize_col: rows are fp8_block_128x128, whose col codes are those of its rows "
            "(transpose_quantized)");
  EXPECT_EQ(error(rows, other), "requantize_col: rows are [32, 32], the output is [64, 32]");
  EXPECT_NE(error(rows, both).find("only the col direction is made"), std::string::npos);
}

}  // namespace
}  // namespace moiety::quant
