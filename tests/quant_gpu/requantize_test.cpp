// On a GPU columns of rows that came quantized have the bytes of the CPU's, which are those of two
// calls (tests/quant/requantize_test.cpp), without memory for the values between.
#include "moiety/quant/requantize.h"

#include "tests/quant/grouped_cases.h"
#include "tests/quant/requantize_cases.h"
#include "tests/quant_gpu/gpu_cases.h"

namespace moiety::quant {
namespace {

class RequantizeGpu : public QuantGpuTest, public testing::WithParamInterface<SpecCase> {
 protected:
  const QuantSpec& to() const { return GetParam().spec; }
  // A copy of rows there.
  GpuGuarded there(const Guarded& rows) {
    const QuantizedView& v = rows.view();
    GpuGuarded out(v.spec, v.rows, v.cols, {true, false}, stream);
    out.set(v);
    return out;
  }
  static Guarded host_rows(const QuantSpec& spec, const TensorView& x) {
    Guarded rows(spec, x.size(0), x.size(1), {true, false});
    quantize(x, rows, {}, Stream());
    return rows;
  }
};
INSTANTIATE_TEST_SUITE_P(All, RequantizeGpu, testing::ValuesIn(col_cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(RequantizeGpu, EqualsTheCpu) {
  const std::pair<Shape, Data> cases[] = {
      {{1, 1}, Data::kNormal},    {{17, 33}, Data::kNormal},       {{129, 72}, Data::kNormal},
      {{0, 40}, Data::kNormal},   {{256, 384}, Data::kNormal},     {{300, 1030}, Data::kNormal},
      {{40, 136}, Data::kOneNan}, {{40, 136}, Data::kHugeAndTiny}, {{64, 0}, Data::kNormal}};
  for (const QuantSpec& from : row_specs(false)) {
    for (const auto& [shape, data] : cases) {
      const Guarded rows = host_rows(from, Input(DType::kBFloat16, shape, data));
      const Guarded expected(to(), shape.rows, shape.cols, Directions{false, true});
      requantize_col(rows, expected, test_options(), {}, Stream());
      const GpuGuarded codes = there(rows);
      const GpuGuarded got(to(), shape.rows, shape.cols, {false, true}, stream);
      requantize_col(codes, got, gpu_options(), {}, stream);
      ASSERT_EQ(got.difference_from(expected), "")
          << name(shape) << " " << name(data) << " of " << name(from.format);
    }
  }
}

TEST_P(RequantizeGpu, OfGroupsEqualsTheCpu) {
  if (is_tile(to().format)) return;
  for (const Routing& routing : routings()) {
    const Problem p(routing);
    const Tensor x = p.input(DType::kBFloat16, Data::kNormal);
    for (const QuantSpec& from : row_specs(true)) {
      const Guarded rows = host_rows(from, x);
      const Guarded expected = p.output(to(), {false, true}, 0xA5);
      requantize_col_grouped(rows, p.groups, expected, test_options(), {}, Stream());
      const GpuGuarded codes = there(rows);
      const Tensor begin = to_gpu(p.begin, stream), count = to_gpu(p.count, stream),
                   status = to_gpu(p.status, stream);
      const RowGroups groups{count, begin, status, p.experts, p.capacity, 0};
      const GpuGuarded got(
          to(), p.capacity, kCols,
          quantized_grouped_sizes(to(), p.capacity, kCols, p.experts, {false, true}), p.experts,
          stream);
      requantize_col_grouped(codes, groups, got, gpu_options(), {}, stream);
      ASSERT_EQ(got.difference_from(expected), "") << routing.name << " of " << name(from.format);
    }
  }
}

// With memory for the values both come, as from two calls.
TEST_P(RequantizeGpu, LeavesTheValuesWhereTheyAreWanted) {
  const Shape shape{129, 72};
  const QuantSpec from = QuantSpec::of(Format::kMxfp8);
  const Guarded rows = host_rows(from, Input(DType::kBFloat16, shape, Data::kNormal));
  const Guarded expected(to(), shape.rows, shape.cols, Directions{false, true});
  const Tensor values(DType::kBFloat16, {shape.rows, shape.cols});
  requantize_col(rows, expected, test_options(), values, Stream());
  const GpuGuarded codes = there(rows);
  const GpuGuarded got(to(), shape.rows, shape.cols, {false, true}, stream);
  const Tensor here(DType::kBFloat16, {shape.rows, shape.cols}, kGpu, "values");
  requantize_col(codes, got, gpu_options(), here, stream);
  EXPECT_EQ(got.difference_from(expected), "");
  EXPECT_EQ(difference("values", to_host(here, stream), values), "");
}

}  // namespace
}  // namespace moiety::quant
