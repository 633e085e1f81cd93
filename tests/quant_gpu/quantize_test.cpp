// quantize on a GPU gives the bytes of the CPU reference, over the table of cases.
#include "moiety/quant/quantize.h"

#include "tests/quant_gpu/gpu_cases.h"

namespace moiety::quant {
namespace {

class QuantizeGpu : public QuantGpuTest, public testing::WithParamInterface<SpecCase> {
 protected:
  const QuantSpec& spec() const { return GetParam().spec; }

  std::string compare(const TensorView& x, Directions wanted, int64_t offset = 0,
                      const QuantizeOptions& options = test_options()) {
    const Guarded expected = reference(x, spec(), wanted, options);
    const GpuInput there(x, stream, offset);
    const GpuGuarded out(spec(), x.size(0), x.size(1), wanted, stream);
    quantize(there, out, gpu_options(options), stream);
    return out.difference_from(expected);
  }
};
INSTANTIATE_TEST_SUITE_P(All, QuantizeGpu, testing::ValuesIn(spec_cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(QuantizeGpu, EqualsReferenceOnAllShapesAndData) {
  size_t turn = 0;
  for (const Shape& shape : small_shapes()) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
      for (const Directions wanted : directions_of(spec())) {
        for (const Data data : kAllData) {
          // A share of the product, in which every pair of the table occurs.
          if (!full_tests() && turn++ % 5 != 0) continue;
          const Input x(dtype, shape, data, static_cast<int64_t>(turn % 3 * 4));
          ASSERT_EQ(compare(x, wanted, static_cast<int64_t>(turn % 2)), "")
              << name(shape) << " " << name(dtype) << " " << name(data) << " row " << wanted.row
              << " col " << wanted.col;
        }
      }
    }
  }
}

// Against the CPU's fast path, which tests/quant holds against the reference.
TEST_P(QuantizeGpu, EqualsTheCpuOnLargeShapes) {
  for (const Shape& shape : {Shape{1024, 1040}, Shape{2048, 5120}}) {
    if (shape.rows > 1024 && !full_tests()) continue;
    for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
      const Input x(dtype, shape, Data::kNormal);
      const Directions both{true, !spec().row_scaled};
      const Guarded expected(spec(), shape.rows, shape.cols, both);
      quantize(x, expected, test_options(), Stream());
      const GpuInput there(x, stream);
      const GpuGuarded out(spec(), shape.rows, shape.cols, both, stream);
      quantize(there, out, gpu_options(), stream);
      ASSERT_EQ(out.difference_from(expected), "") << name(shape) << name(dtype);
    }
  }
}

// A row whose length is more than the row_scaled kernel keeps in registers.
TEST_P(QuantizeGpu, LongRows) {
  if (spec().format != Format::kNvfp4) GTEST_SKIP() << "one kernel has a limit";
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    const Input x(dtype, {3, 40000}, Data::kNormal);
    EXPECT_EQ(compare(x, {true, false}), "");
  }
}

// Rows that begin anywhere: every misalignment of the first and of the next, of X and of codes.
TEST_P(QuantizeGpu, AnyAlignment) {
  const Directions both{true, !spec().row_scaled};
  for (int64_t i = 0; i < 16; ++i) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
      // More than a tile, which has neighbours, and less, which has both ends of a row.
      const int64_t tail = i % 2 ? 128 : 0;
      const Input x(dtype, {130 + i, tail + 144 + i}, Data::kNormal, (i * 5 + 3) % 16,
                    static_cast<uint32_t>(i));
      ASSERT_EQ(compare(x, both, i), "") << i << name(dtype);
      const Input narrow(dtype, {17, 97 + i}, Data::kNormal, i / 4);
      ASSERT_EQ(compare(narrow, both, 15 - i), "") << i << name(dtype);
    }
  }
}

// There are so many tiles that a block measures several.
TEST_P(QuantizeGpu, ManyTiles) {
  if (!is_tensor_scaled(spec().format)) GTEST_SKIP() << "nothing is measured";
  const Input x(DType::kBFloat16, {1, 530001}, Data::kNormal);
  EXPECT_EQ(compare(x, {true, !spec().row_scaled}), "");
}

TEST_P(QuantizeGpu, ShardsDrawAsTheWhole) {
  QuantizeOptions options = test_options();
  options.row0 = 48;
  options.col0 = 32;
  options.full_rows = 1000;
  options.full_cols = int64_t{1} << 36;
  options.expert = 9;
  const Input x(DType::kBFloat16, {33, 80}, Data::kNormal);
  for (const Directions wanted : directions_of(spec())) {
    EXPECT_EQ(compare(x, wanted, 0, options), "");
  }
}

TEST_P(QuantizeGpu, GivenAmax) {
  if (!is_tensor_scaled(spec().format)) GTEST_SKIP() << "no amax";
  QuantizeOptions options = test_options();
  options.amax_given = true;
  for (const Data data : {Data::kNormal, Data::kOneNan, Data::kOneInf}) {
    const Input x(DType::kFloat32, {45, 144}, data);
    const GpuInput there(x, stream);
    for (const Directions wanted : directions_of(spec())) {
      const Guarded expected(spec(), 45, 144, wanted);
      GpuGuarded out(spec(), 45, 144, wanted, stream);
      for (int64_t i = 0; i < expected.view().amax.numel(); ++i) {
        expected.view().amax.data<float>()[i] = 2.5f + static_cast<float>(i);
      }
      out.set(expected);
      quantize_reference(make_quantize_job("test", x, expected, options));
      quantize(there, out, gpu_options(options), stream);
      EXPECT_EQ(out.difference_from(expected), "") << name(data);
    }
  }
}

TEST_P(QuantizeGpu, ComputeAmax) {
  if (!is_tensor_scaled(spec().format)) GTEST_SKIP() << "no amax";
  for (const Directions wanted : {Directions{true, true}, {true, false}, {false, true}}) {
    if (wanted.col && spec().row_scaled) continue;
    for (const Data data : kAllData) {
      const Input x(DType::kBFloat16, {150, 137}, data, 3);
      const Guarded expected(spec(), 150, 137, wanted);
      const GpuGuarded out(spec(), 150, 137, wanted, stream);
      compute_amax(x, expected, test_options(), Stream());
      compute_amax(GpuInput(x, stream), out, gpu_options(), stream);
      EXPECT_EQ(out.difference_from(expected), "") << name(data);
    }
  }
}

TEST_P(QuantizeGpu, SkipChangesNothing) {
  const Input x(DType::kBFloat16, {20, 40}, Data::kNormal);
  const GpuInput there(x, stream);
  Tensor five(DType::kUInt32, {1});
  *five.data<uint32_t>() = 5;
  const Tensor skip = to_gpu(five, stream);
  QuantizeOptions options = gpu_options();
  options.skip = skip;
  const Directions both{true, !spec().row_scaled};
  const Guarded untouched(spec(), 20, 40, both);
  const GpuGuarded out(spec(), 20, 40, both, stream);
  quantize(there, out, options, stream);
  if (out.view().amax.defined()) compute_amax(there, out, options, stream);
  EXPECT_EQ(out.difference_from(untouched), "");
}

class QuantizeGpuCalls : public QuantGpuTest {};

TEST_F(QuantizeGpuCalls, DelayedScaling) {
  for (const SpecCase& c : spec_cases()) {
    if (c.spec.format != Format::kFp8Tensor) continue;
    for (const Data data : {Data::kNormal, Data::kOneInf, Data::kOneNan}) {
      const Input x(DType::kBFloat16, {150, 137}, data);
      const GpuInput there(x, stream);
      Tensor scale(DType::kFloat32, {1}), inverse(DType::kFloat32, {1}), step(DType::kFloat32, {1});
      *scale.data<float>() = 48;
      *inverse.data<float>() = 1 / 48.0f;
      *step.data<float>() = 0.5f;
      const Tensor gpu_scale = to_gpu(scale, stream), gpu_inverse = to_gpu(inverse, stream),
                   gpu_step = to_gpu(step, stream);
      const DelayedScaling state{{}, {}, scale, inverse, step};
      const DelayedScaling gpu_state{{}, {}, gpu_scale, gpu_inverse, gpu_step};
      for (const Directions wanted : directions_of(c.spec)) {
        QuantizeOptions options = test_options();
        options.delayed = &state;
        const Guarded expected = reference(x, c.spec, wanted, options);
        const GpuGuarded out(c.spec, 150, 137, wanted, stream);
        options.delayed = &gpu_state;
        quantize(there, out, gpu_options(options), stream);
        EXPECT_EQ(out.difference_from(expected), "") << c.name << name(data);
        EXPECT_EQ(difference("step_amax", to_host(gpu_step, stream), step), "");
      }
    }
  }
}

TEST_F(QuantizeGpuCalls, RefuseTensorsElsewhere) {
  const QuantSpec spec = QuantSpec::of(Format::kMxfp8);
  const Tensor here(DType::kBFloat16, {32, 32}), there(DType::kBFloat16, {32, 32}, kGpu);
  const QuantizedTensor out(spec, 32, 32, {true, false}, kGpu);
  EXPECT_NE(kind_and_error_of([&] {
              quantize(here, out, {}, stream);
            }).find("quantize: row_data is e4m3[32, 32] on cuda:0, but x is on cpu"),
            std::string::npos);
  EXPECT_NE(kind_and_error_of([&] { quantize(there, out, {}, Stream()); }).find("must be on cpu"),
            std::string::npos);
  const QuantizedTensor host(spec, 32, 32, {true, false});
  EXPECT_NE(kind_and_error_of([&] { quantize(here, host, {}, stream); }).find("must be on cuda:0"),
            std::string::npos);
  const QuantizeItem item{there, out, {}};
  EXPECT_NE(kind_and_error_of([&] {
              quantize_many(QuantizeTable({&item, 1}), Stream());
            }).find("the tensors are on cuda:0, the stream on cpu"),
            std::string::npos);
}

}  // namespace
}  // namespace moiety::quant
