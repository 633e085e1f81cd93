// dequantize: values against double precision, operands against exact products, the transform taken
// back, and the fast path against the reference.
#include "moiety/quant/dequantize.h"

#include <cmath>

#include "moiety/base/parallel.h"
#include "moiety/formats/e2m1.h"
#include "moiety/formats/e4m3.h"
#include "moiety/formats/e5m2.h"
#include "moiety/formats/ue8m0.h"
#include "moiety/quant/convert/dequantize_job.h"
#include "moiety/quant/hadamard.h"
#include "tests/quant/cases.h"

namespace moiety::quant {
namespace {

std::vector<Direction> directions(const QuantSpec& spec) {
  if (spec.row_scaled) return {Direction::kRow};
  return {Direction::kRow, Direction::kCol};
}

// Shape of what a direction gives.
Shape result_shape(const QuantizedView& x, Direction direction, bool undo = false) {
  if (direction == Direction::kRow || is_mxfp8(x.spec.format)) return {x.rows, x.cols};
  const bool tail = x.spec.rht_col && !undo;
  return {x.cols, tail ? (x.rows + 15) / 16 * 16 : x.rows};
}

// Which shape that is, and whether it is turned, is no secret.
void expect_shape(const QuantizedView& x, Direction direction, bool undo = false) {
  const Shape shape = result_shape(x, direction, undo);
  const DequantizedShape said = dequantized_shape(x, direction, {.undo_rht = undo});
  EXPECT_EQ(said.rows, shape.rows);
  EXPECT_EQ(said.cols, shape.cols);
  EXPECT_EQ(said.transposed, direction == Direction::kCol && !is_mxfp8(x.spec.format));
}

class DequantizeSpecs : public testing::TestWithParam<SpecCase> {
 protected:
  // X quantized in every direction.
  Guarded quantized(const TensorView& x) const {
    const QuantSpec& spec = GetParam().spec;
    Guarded out(spec, x.size(0), x.size(1), {true, !spec.row_scaled});
    quantize(x, out, test_options(), Stream());
    return out;
  }
};
INSTANTIATE_TEST_SUITE_P(All, DequantizeSpecs, testing::ValuesIn(spec_cases()),
                         [](const auto& info) { return info.param.name; });

// Writes into the middle of a poisoned matrix and checks what is around.
template <class Run>
Tensor poisoned_result(DType dtype, Shape shape, Run&& run) {
  Tensor memory(dtype, {shape.rows + 2, shape.cols + 5});
  std::memset(memory.view().raw(), 0xA5, static_cast<size_t>(memory.view().bytes()));
  run(memory.view().slice(0, 1, shape.rows + 1).slice(1, 2, shape.cols + 2));
  return memory;
}

TEST_P(DequantizeSpecs, FastPathEqualsReference) {
  const ThreadBudget budget(1);
  size_t turn = 0;
  for (const Shape& shape : small_shapes()) {
    for (const Data data : kAllData) {
      if (!full_tests() && turn++ % 9 != 0) continue;
      const Input x(DType::kFloat32, shape, data);
      const Guarded q = quantized(x);
      for (const Direction d : directions(GetParam().spec)) {
        for (int mode = 0; mode < 4; ++mode) {
          const Dequantized what = mode == 0 ? Dequantized::kOperand : Dequantized::kValues;
          const DType dtype = mode < 2 ? DType::kBFloat16 : DType::kFloat32;
          const bool undo = mode == 3;
          if (undo && !(GetParam().spec.rht_col && d == Direction::kCol)) continue;
          const auto run = [&](auto implementation) {
            return poisoned_result(dtype, result_shape(q, d, undo), [&](const TensorView& out) {
              implementation(make_dequantize_job("test", q, d, out, what, undo));
            });
          };
          ASSERT_TRUE(same_bits(run(dequantize_cpu), run(dequantize_reference)))
              << name(shape) << name(data) << " direction " << int(d) << " mode " << mode;
        }
      }
    }
  }
}

// The exact value of element (r, c) of a direction, from the bytes, in double precision.
struct Exact {
  double code, scale, tensor;
};
Exact exact(const QuantizedView& q, Direction d, int64_t r, int64_t c) {
  const Format format = q.spec.format;
  const bool col = d == Direction::kCol, tile = is_tile(format);
  const TensorView& data = col && format != Format::kMxfp8Tile32 ? q.col_data : q.row_data;
  const auto* codes = static_cast<const uint8_t*>(data.raw()) + r * data.size(1);
  Exact out{0, 1, 1};
  out.code = is_fp4(format)                   ? E2M1::decode(E2M1::unpack(codes[c / 2], c % 2))
             : q.spec.element == DType::kE5M2 ? E5M2::decode(codes[c])
                                              : E4M3::decode(codes[c]);
  if (is_tensor_scaled(format)) {
    out.tensor = q.tensor_scale.data<float>()[q.spec.row_scaled ? r : int{col}];
  }
  if (format == Format::kFp8Tensor) return out;
  const BlockShape block = block_shape(format);
  const bool turned = col && !is_mxfp8(format);
  const TensorView& scales = col && !tile ? q.col_scales : q.row_scales;
  int64_t sr = r / block.rows, sc = c / block.cols;
  if (tile && turned) {
    sr = c / block.rows;
    sc = r / block.cols;
  } else if (col && format == Format::kMxfp8) {
    sr = r / 32;
    sc = c;
  }
  const int64_t i = sr * scales.size(1) + sc;
  out.scale = is_fp8_block(format) ? scales.data<float>()[i]
              : is_fp4(format)     ? E4M3::decode(static_cast<const uint8_t*>(scales.raw())[i])
                                   : UE8M0::decode(static_cast<const uint8_t*>(scales.raw())[i]);
  return out;
}

TEST_P(DequantizeSpecs, ValuesAreWithinOneUlpOfDouble) {
  for (const Data data : {Data::kNormal, Data::kHugeAndTiny, Data::kOneNan}) {
    const Input x(DType::kFloat32, {47, 150}, data);
    const Guarded g = quantized(x);
    const QuantizedView& q = g;
    for (const Direction d : directions(q.spec)) {
      const Shape shape = result_shape(q, d);
      Tensor out(DType::kFloat32, {shape.rows, shape.cols});
      dequantize(q, d, out, {}, Stream());
      for (int64_t r = 0; r < shape.rows; ++r) {
        for (int64_t c = 0; c < shape.cols; ++c) {
          const Exact e = exact(q, d, r, c);
          const double expected = e.code * e.scale * e.tensor;
          const float v = out.data<float>()[r * shape.cols + c];
          if (std::isnan(expected)) {
            ASSERT_EQ(std::bit_cast<uint32_t>(v), 0x7FFFFFFFu);
            continue;
          }
          const float nearest = static_cast<float>(expected);
          ASSERT_LE(std::fabs(v - expected), std::nextafter(std::fabs(nearest), HUGE_VALF) -
                                                 static_cast<double>(std::fabs(nearest)))
              << r << " " << c;
        }
      }
    }
  }
}

// The scales that the operand leaves out are applied to the accumulators; the rest is exact in
// bf16.
TEST_P(DequantizeSpecs, OperandsAreExact) {
  const Input x(DType::kFloat32, {47, 150}, Data::kNormal);
  const Guarded g = quantized(x);
  const QuantizedView& q = g;
  const bool scaled =
      q.spec.format != Format::kFp8Tensor && (!is_fp8_block(q.spec.format) || q.spec.pow2_scales);
  for (const Direction d : directions(q.spec)) {
    const Shape shape = result_shape(q, d);
    Tensor out(DType::kBFloat16, {shape.rows, shape.cols});
    dequantize_operand(q, d, out, Stream());
    for (int64_t r = 0; r < shape.rows; ++r) {
      for (int64_t c = 0; c < shape.cols; ++c) {
        const Exact e = exact(q, d, r, c);
        const float v = out.data<bf16>()[r * shape.cols + c];
        ASSERT_EQ(v, e.code * (scaled ? e.scale : 1)) << r << " " << c;
      }
    }
  }
}

// The error of a value is at most what half a step of its code (a step, if random) is worth; the
// bound is on the block, whose largest element has the largest step.
TEST_P(DequantizeSpecs, ValuesAreNearTheSource) {
  const QuantSpec& spec = GetParam().spec;
  const Input x(DType::kFloat32, {64, 144}, Data::kNormal);
  const Guarded q = quantized(x);
  // Steps as shares of the block's largest element: E2M1 2 of 6, E4M3 32 of 448 (more if the scale
  // is rounded to a power of two), E5M2 8192 of 57344.
  const double step = spec.element == DType::kE2M1   ? 1 / 2.6
                      : spec.element == DType::kE5M2 ? 1 / 3.5
                                                     : 1 / 7.0;
  const double share = spec.rounding == Rounding::kStochastic ? step : step / 2;
  for (const Direction d : directions(spec)) {
    const Shape shape = result_shape(q, d, true);
    expect_shape(q, d, true);
    expect_shape(q, d);
    Tensor out(DType::kFloat32, {shape.rows, shape.cols});
    const bool rotated = spec.rht_col && d == Direction::kCol;
    dequantize(q, d, out, {.undo_rht = rotated}, Stream());
    const bool turned = d == Direction::kCol && !is_mxfp8(spec.format);
    double largest = 0;
    for (int64_t i = 0; i < 64 * 144; ++i) {
      largest = std::max<double>(largest, std::fabs(x.view().data<float>()[i]));
    }
    double square = 0;
    for (int64_t r = 0; r < 64; ++r) {
      for (int64_t c = 0; c < 144; ++c) {
        const double v = out.data<float>()[turned ? c * 64 + r : r * 144 + c];
        const double error = std::fabs(v - x.view().data<float>()[r * 144 + c]);
        square += error * error;
        // The rotation spreads the errors of 16 elements over all of them.
        ASSERT_LE(error, share * largest * (rotated ? 4 : 1)) << r << " " << c;
      }
    }
    EXPECT_LT(std::sqrt(square / (64 * 144)), share / 2 * 2.2);
  }
}

TEST(Dequantize, UndoesTheRotationOfWholeNumbers) {
  // Codes that hold the rotated numbers exactly: amax 6 and scales of powers of two.
  Tensor x(DType::kBFloat16, {16, 1});
  x.data<bf16>()[3] = bf16(24.0f);  // rotated: 16 times +-6
  QuantSpec spec = QuantSpec::of(Format::kNvfp4);
  spec.rht_col = true;
  const Guarded q(spec, 16, 1, {false, true});
  quantize(x, q, {}, Stream());
  Tensor back(DType::kFloat32, {1, 16});
  dequantize(q, Direction::kCol, back, {.undo_rht = true}, Stream());
  for (int i = 0; i < 16; ++i) EXPECT_NEAR(back.data<float>()[i], i == 3 ? 24 : 0, 1e-5);
  Tensor rotated(DType::kFloat32, {1, 16});
  dequantize(q, Direction::kCol, rotated, {}, Stream());
  for (int i = 0; i < 16; ++i) EXPECT_NEAR(std::fabs(rotated.data<float>()[i]), 6, 1e-5);
}

TEST(Dequantize, ValuesNearTheLargestFloatBecomeInfinite) {
  Tensor x(DType::kFloat32, {1, 32});
  x.data<float>()[0] = -std::numeric_limits<float>::max();
  const Guarded q(QuantSpec::of(Format::kMxfp8), 1, 32, {true, false});
  quantize(x, q, {}, Stream());
  Tensor out(DType::kFloat32, {1, 32});
  dequantize(q, Direction::kRow, out, {}, Stream());
  EXPECT_EQ(out.data<float>()[0], -std::numeric_limits<float>::infinity());
}

TEST(Dequantize, ErrorsNameOperationAndArgument) {
  const QuantizedTensor q(QuantSpec::of(Format::kNvfp4), 32, 48, {true, false});
  Tensor out(DType::kFloat32, {32, 48});
  const auto run = [&](Direction d, DequantizeOptions options = {}) {
    return kind_and_error_of([&] { dequantize(q, d, out, options, Stream()); });
  };
  EXPECT_EQ(run(Direction::kRow), "no error");
  EXPECT_NE(run(Direction::kCol).find("dequantize: x has no col data"), std::string::npos);
  EXPECT_NE(run(Direction::kRow, {.undo_rht = true}).find("undo_rht"), std::string::npos);
  EXPECT_NE(kind_and_error_of([&] {
              dequantize_operand(q, Direction::kRow, out, Stream());
            }).find("dequantize_operand: out is float32[32, 48], expected bfloat16[32, 48]"),
            std::string::npos);
}

}  // namespace
}  // namespace moiety::quant
