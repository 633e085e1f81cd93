// dequantize, operands and layouts of scales on a GPU give the bytes of the CPU reference.
#include "moiety/quant/dequantize.h"

#include "moiety/quant/convert/dequantize_job.h"
#include "moiety/quant/scale_layout.h"
#include "moiety/quant/scale_layout_job.h"
#include "tests/quant/layout_cases.h"
#include "tests/quant_gpu/gpu_cases.h"

namespace moiety::quant {
namespace {

class DequantizeGpu : public QuantGpuTest, public testing::WithParamInterface<SpecCase> {
 protected:
  const QuantSpec& spec() const { return GetParam().spec; }

  // Both into the middle of a poisoned matrix, whose rows are `gap` elements longer.
  std::string compare(const QuantizedView& host, const QuantizedView& gpu, Direction d,
                      Dequantized what, DType dtype, bool undo, int64_t gap) {
    const bool turned = d == Direction::kCol && !is_mxfp8(spec().format);
    const int64_t rows = turned ? host.cols : host.rows;
    int64_t cols = turned ? host.rows : host.cols;
    if (turned && spec().rht_col && !undo) cols = (cols + 15) / 16 * 16;
    Tensor expected(dtype, {rows + 2, cols + gap});
    std::memset(expected.view().raw(), 0xA5, static_cast<size_t>(expected.view().bytes()));
    const Tensor there = to_gpu(expected, stream);
    const auto middle = [&](const TensorView& x) {
      return x.slice(0, 1, rows + 1).slice(1, gap / 2, cols + gap / 2);
    };
    dequantize_reference(make_dequantize_job("reference", host, d, middle(expected), what, undo));
    if (what == Dequantized::kOperand) {
      dequantize_operand(gpu, d, middle(there), stream);
    } else {
      dequantize(gpu, d, middle(there), {.undo_rht = undo}, stream);
    }
    return difference("out", to_host(there, stream), expected);
  }

  // All that can be made of one tensor.
  void check(const QuantizedView& host, const QuantizedView& gpu, int64_t gap) {
    for (const Direction d : {Direction::kRow, Direction::kCol}) {
      if (d == Direction::kCol && spec().row_scaled) continue;
      ASSERT_EQ(compare(host, gpu, d, Dequantized::kOperand, DType::kBFloat16, false, gap), "");
      for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
        ASSERT_EQ(compare(host, gpu, d, Dequantized::kValues, dtype, false, gap), "");
        if (!spec().rht_col || d == Direction::kRow) continue;
        ASSERT_EQ(compare(host, gpu, d, Dequantized::kValues, dtype, true, gap), "");
      }
    }
  }
};
INSTANTIATE_TEST_SUITE_P(All, DequantizeGpu, testing::ValuesIn(spec_cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(DequantizeGpu, EqualsReference) {
  size_t turn = 0;
  const Directions both{true, !spec().row_scaled};
  std::vector<Shape> shapes = small_shapes();
  shapes.push_back({300, 528});
  for (const Shape& shape : shapes) {
    for (const Data data : kAllData) {
      if (!full_tests() && turn++ % 7 != 0) continue;
      const Input x(DType::kFloat32, shape, data);
      const Guarded host = reference(x, spec(), both, test_options());
      GpuGuarded gpu(spec(), shape.rows, shape.cols, both, stream);
      gpu.set(host);
      for (const int64_t gap : {0, 5, 16}) {
        SCOPED_TRACE(text("{} {} gap {}", name(shape), name(data), gap));
        ASSERT_NO_FATAL_FAILURE(check(host, gpu, gap));
      }
    }
  }
}

// Codes and values whose rows begin anywhere.
TEST_P(DequantizeGpu, AnyAlignment) {
  const Directions both{true, !spec().row_scaled};
  for (int64_t i = 0; i < 16; ++i) {
    const Shape shape{35 + i, 600 + i};
    const Input x(DType::kBFloat16, shape, Data::kNormal);
    const Guarded host = reference(x, spec(), both, test_options());
    GpuGuarded gpu(spec(), shape.rows, shape.cols, both, stream);
    gpu.set(host);
    SCOPED_TRACE(name(shape));
    // With a gap of 8, rows of values begin at multiples of eight bytes where codes lie in whole
    // words.
    for (const int64_t gap : {(i * 3 + 1) % 16, int64_t{8}}) {
      ASSERT_NO_FATAL_FAILURE(check(host, gpu, gap));
    }
  }
}

// Random codes and scales: NaN, infinity (E5M2) and negative scales among them.
TEST_P(DequantizeGpu, EqualsReferenceOnAnyBytes) {
  const Directions both{true, !spec().row_scaled};
  const PhiloxKey key = rng_key(9, RngDomain::kInit);
  for (const Shape& shape : {Shape{256, 256}, Shape{77, 150}}) {
    const Guarded host(spec(), shape.rows, shape.cols, both);
    uint32_t n = 0;
    for (const TensorView* x : {&host.view().row_data, &host.view().row_scales,
                                &host.view().col_data, &host.view().col_scales}) {
      for (int64_t i = 0; x->defined() && i < x->bytes(); ++i) {
        static_cast<uint8_t*>(x->raw())[i] = static_cast<uint8_t>(philox(key, {n++, 0, 0, 0})[0]);
      }
    }
    for (int64_t i = 0; i < host.view().tensor_scale.numel(); ++i) {
      host.view().tensor_scale.data<float>()[i] = 0.37f;
    }
    GpuGuarded gpu(spec(), shape.rows, shape.cols, both, stream);
    gpu.set(host);
    ASSERT_NO_FATAL_FAILURE(check(host, gpu, 0));
  }
}

class LayoutsGpu : public QuantGpuTest {
 protected:
  // Scales alone, R x C of them, distinct in their bytes.
  template <class Body>
  void for_each(Format format, Direction direction, Body&& body) {
    const int64_t block = block_shape(format).cols;
    const bool row = direction == Direction::kRow;
    for (const int64_t r : {1, 4, 5, 127, 129, 300}) {
      for (const int64_t n : {1, 4, 5, 127, 129, 208, 300}) {
        if (!full_tests() && (r + n) % 3 == 1) continue;
        const int64_t along = n * block - (n % 2 ? 3 : 0);
        const Shape shape = row ? Shape{r, along} : Shape{along, r};
        const QuantSpec spec = QuantSpec::of(format);
        QuantizedSizes sizes = quantized_sizes(spec, shape.rows, shape.cols, {row, !row});
        sizes.row_data = sizes.col_data = {};
        const Guarded host(spec, shape.rows, shape.cols, sizes, 1);
        const TensorView& scales =
            row || is_tile(format) ? host.view().row_scales : host.view().col_scales;
        for (int64_t i = 0; i < scales.bytes(); ++i) {
          static_cast<uint8_t*>(scales.raw())[i] = static_cast<uint8_t>(1 + i * 37 % 251);
        }
        SCOPED_TRACE(text("{} col={} {}x{}", name(format), !row, r, n));
        body(host, sizes, shape);
      }
    }
  }
  Tensor poisoned(const ArraySpec& a) {
    Tensor out(a.dtype, std::span(a.sizes.data(), static_cast<size_t>(a.dims)));
    std::memset(out.view().raw(), 0xA5, static_cast<size_t>(out.view().bytes()));
    return out;
  }
};

TEST_F(LayoutsGpu, ConversionsEqualTheReferenceAndHaveAnInverse) {
  for (const LayoutCase& c : layout_cases()) {
    for_each(c.format, c.direction,
             [&](const Guarded& host, const QuantizedSizes& sizes, const Shape& shape) {
               const Tensor expected = poisoned(scale_layout_size(host, c.direction, c.layout));
               const Tensor there = to_gpu(expected, stream);
               convert_scales(host, c.direction, c.layout, expected, Stream());
               GpuGuarded gpu(host.view().spec, shape.rows, shape.cols, sizes, 1, stream);
               gpu.set(host);
               convert_scales(gpu, c.direction, c.layout, there, stream);
               ASSERT_EQ(difference("scales", to_host(there, stream), expected), "")
                   << name(c.layout);
               ASSERT_EQ(gpu.difference_from(host), "");
               if (is_tile(c.format)) return;
               const GpuGuarded back(host.view().spec, shape.rows, shape.cols, sizes, 1, stream);
               compact_scales(there, c.layout, back, c.direction, stream);
               const Tensor round = to_host(
                   c.direction == Direction::kRow ? back.view().row_scales : back.view().col_scales,
                   stream);
               ASSERT_EQ(difference("compact", round,
                                    c.direction == Direction::kRow ? host.view().row_scales
                                                                   : host.view().col_scales),
                         "");
             });
  }
}

TEST_F(LayoutsGpu, Fp8BlockScalesAsThoseOfMxfp8) {
  for (const Format f : {Format::kFp8Block1x128, Format::kFp8Block128x128}) {
    for (const Direction d : {Direction::kRow, Direction::kCol}) {
      for_each(f, d, [&](const Guarded& host, const QuantizedSizes& sizes, const Shape& shape) {
        const bool row = d == Direction::kRow;
        const TensorView& scales =
            row || is_tile(f) ? host.view().row_scales : host.view().col_scales;
        for (int64_t i = 0; i < scales.numel(); ++i) {
          // Powers of two, the least among them; here and there something else, or NaN.
          const uint32_t bits = i % 97 == 50   ? 0x3FC00000u
                                : i % 89 == 3  ? 0x7FFFFFFFu
                                : i % 255 == 0 ? 0x00400000u
                                               : static_cast<uint32_t>(i % 255) << 23;
          scales.data<float>()[i] = std::bit_cast<float>(bits);
        }
        const Tensor expected = poisoned(
            {DType::kUE8M0,
             2,
             {row ? shape.rows : shape.cols, ((row ? shape.cols : shape.rows) + 31) / 32}});
        const Tensor there = to_gpu(expected, stream);
        GpuGuarded gpu(host.view().spec, shape.rows, shape.cols, sizes, 1, stream);
        gpu.set(host);
        fp8_block_to_mxfp8(host, d, expected, Stream());
        fp8_block_to_mxfp8(gpu, d, there, stream);
        ASSERT_EQ(difference("bytes", to_host(there, stream), expected), "");
        ASSERT_EQ(gpu.difference_from(host), "");
      });
    }
  }
}

}  // namespace
}  // namespace moiety::quant
