// transpose_quantized = the col half of quantize, over the table of cases.
#include "moiety/quant/transpose.h"

#include "moiety/base/parallel.h"
#include "moiety/quant/convert/transpose_job.h"
#include "tests/quant/cases.h"

namespace moiety::quant {
namespace {

bool has_common_codes(const QuantSpec& spec) {
  return is_tile(spec.format) || spec.format == Format::kFp8Tensor;
}

// The row half of X, and col arrays full of poison: as after a gather.
Guarded gathered(const TensorView& x, const QuantSpec& spec) {
  const Guarded row(spec, x.size(0), x.size(1), {true, false});
  quantize(x, row, test_options(), Stream());
  Guarded out(spec, x.size(0), x.size(1), {true, true}, 0x5A);
  const auto copy = [](const TensorView& to, const TensorView& from) {
    if (from.bytes() > 0) std::memcpy(to.raw(), from.raw(), static_cast<size_t>(from.bytes()));
  };
  copy(out.view().row_data, row.view().row_data);
  copy(out.view().row_scales, row.view().row_scales);
  copy(out.view().amax, row.view().amax);
  copy(out.view().tensor_scale, row.view().tensor_scale);
  copy(out.view().flags, row.view().flags);
  return out;
}

TEST(Transpose, IsTheColHalfOfQuantize) {
  const ThreadBudget budget(1);
  std::vector<Shape> shapes = small_shapes();
  shapes.push_back({300, 700});
  for (const SpecCase& c : spec_cases()) {
    if (!has_common_codes(c.spec)) continue;
    std::vector<Guarded> moved, expected;
    std::vector<QuantizeItem> items;
    for (const Shape& shape : shapes) {
      const Input x(DType::kBFloat16, shape, Data::kNormal);
      expected.emplace_back(c.spec, shape.rows, shape.cols, Directions{true, true});
      quantize(x, expected.back(), test_options(), Stream());
      moved.push_back(gathered(x, c.spec));
    }
    for (const Guarded& g : moved) items.push_back({{}, g, {}});
    transpose_quantized(QuantizeTable(items), Stream());
    for (size_t i = 0; i < shapes.size(); ++i) {
      ASSERT_EQ(difference(moved[i], expected[i]), "") << c.name << " " << name(shapes[i]);
      ASSERT_TRUE(moved[i].guards_intact());
    }
  }
}

TEST(Transpose, FastPathEqualsReferenceOnAnyBytes) {
  const PhiloxKey key = rng_key(5, RngDomain::kInit);
  for (const bool fp4 : {false, true}) {
    for (const Shape& shape : {Shape{1, 1}, Shape{2, 3}, Shape{16, 16}, Shape{33, 65},
                               Shape{64, 130}, Shape{127, 300}, Shape{200, 31}}) {
      TransposeJob job;
      job.rows = shape.rows;
      job.cols = shape.cols;
      job.fp4 = fp4;
      job.in_pitch = fp4 ? (shape.cols + 15) / 16 * 8 : shape.cols;
      job.out_pitch = fp4 ? (shape.rows + 15) / 16 * 8 : shape.rows;
      Buffer in(shape.rows * job.in_pitch), fast(shape.cols * job.out_pitch + 64),
          slow(shape.cols * job.out_pitch + 64);
      for (int64_t i = 0; i < in.bytes(); ++i) {
        in.data()[i] = static_cast<std::byte>(philox(key, {static_cast<uint32_t>(i), 0, 0, 0})[0]);
      }
      job.in = reinterpret_cast<const uint8_t*>(in.data());
      for (Buffer* b : {&fast, &slow}) {
        std::memset(b->data(), 0xC3, static_cast<size_t>(b->bytes()));
        job.out = reinterpret_cast<uint8_t*>(b->data());
        b == &fast ? transpose_cpu({&job, 1}) : transpose_reference(job);
      }
      EXPECT_EQ(std::memcmp(fast.data(), slow.data(), static_cast<size_t>(fast.bytes())), 0)
          << name(shape) << fp4;
    }
  }
}

TEST(Transpose, RefusesFormatsWhoseDirectionsDiffer) {
  for (const Format format : {Format::kNvfp4, Format::kFp8Block1x128}) {
    const QuantizedTensor q(QuantSpec::of(format), 32, 32, {true, true});
    const QuantizeItem item{{}, q, {}};
    const QuantizeTable table({&item, 1});
    EXPECT_NE(kind_and_error_of([&] {
                transpose_quantized(table, Stream());
              }).find("different roundings of their source"),
              std::string::npos);
  }
  // MXFP8: nothing to do.
  const QuantizedTensor q(QuantSpec::of(Format::kMxfp8), 32, 32, {true, true});
  const QuantizeItem item{{}, q, {}};
  transpose_quantized(QuantizeTable({&item, 1}), Stream());
  EXPECT_NE(kind_and_error_of([&] {
              quantize_many(QuantizeTable({&item, 1}), Stream());
            }).find("quantize_many: item 0 has no x"),
            std::string::npos);
}

}  // namespace
}  // namespace moiety::quant
