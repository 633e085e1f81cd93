// quantize: golden values, rules of NaN, infinity and pads by hand, halves of both directions, and
// the fast path against the reference, bit for bit, over the table of cases.
#include "moiety/quant/quantize.h"

#include <cmath>
#include <limits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "moiety/base/parallel.h"
#include "moiety/formats/e2m1.h"
#include "moiety/formats/e4m3.h"
#include "moiety/quant/quantize/quantize_job.h"
#include "tests/quant/cases.h"

namespace moiety::quant {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

const uint8_t* bytes(const TensorView& x) { return static_cast<const uint8_t*>(x.raw()); }
std::vector<int> byte_values(const TensorView& x) { return {bytes(x), bytes(x) + x.bytes()}; }
uint32_t float_bits(const TensorView& x, int64_t i) {
  return std::bit_cast<uint32_t>(x.data<float>()[i]);
}

// Runs the dispatched path and the reference on outputs with different poison.
std::string compare(const TensorView& x, const QuantSpec& spec, Directions wanted,
                    const QuantizeOptions& options) {
  const ThreadBudget budget(x.numel() > 500000 ? 3 : 1);
  const Guarded fast(spec, x.size(0), x.size(1), wanted, 0xA5);
  const Guarded slow(spec, x.size(0), x.size(1), wanted, 0x5A);
  // Slots of directions that are not asked for stay as they are.
  for (const Guarded* g : {&fast, &slow}) {
    for (const TensorView* view : {&g->view().amax, &g->view().tensor_scale}) {
      for (int64_t i = 0; i < view->numel(); ++i) view->data<float>()[i] = 0.75f;
    }
  }
  quantize(x, fast, options, Stream());
  quantize_reference(make_quantize_job("test", x, slow, options));
  std::string what = difference(fast, slow);
  if (!fast.guards_intact()) what += "the fast path wrote past an array; ";
  if (!slow.guards_intact()) what += "the reference wrote past an array; ";
  return what;
}

// --- values by hand

TEST(Quantize, Nvfp4GoldenBlock) {
  Tensor x(DType::kFloat32, {1, 16});
  for (int i = 0; i < 16; ++i) x.data<float>()[i] = static_cast<float>(i) - 7.5f;
  const Guarded out(QuantSpec::of(Format::kNvfp4), 1, 16, {true, false});
  quantize(x, out, {}, Stream());
  EXPECT_EQ(byte_values(out.view().row_data),
            (std::vector<int>{0xFF, 0xEE, 0xCD, 0x9A, 0x21, 0x54, 0x66, 0x77}));
  EXPECT_EQ(byte_values(out.view().row_scales), (std::vector<int>{0x7E}));
  EXPECT_EQ(float_bits(out.view().tensor_scale, 0), 0x3B36DB6Eu);
  EXPECT_EQ(out.view().amax.data<float>()[0], 7.5f);

  QuantSpec spec = QuantSpec::of(Format::kNvfp4);
  spec.rounding = Rounding::kStochastic;
  const Guarded random(spec, 1, 16, {true, false});
  quantize(x, random, test_options(), Stream());
  EXPECT_EQ(byte_values(random.view().row_data),
            (std::vector<int>{0xEF, 0xEE, 0xCD, 0x9B, 0x31, 0x54, 0x66, 0x76}));
}

TEST(Quantize, Mxfp8GoldenBlock) {
  Tensor x(DType::kFloat32, {1, 16});
  for (int i = 0; i < 16; ++i) x.data<float>()[i] = static_cast<float>(i) - 7.5f;
  const Guarded out(QuantSpec::of(Format::kMxfp8), 1, 16, {true, false});
  quantize(x, out, {}, Stream());
  EXPECT_EQ(byte_values(out.view().row_scales), (std::vector<int>{122}));
  EXPECT_EQ(byte_values(out.view().row_data),
            (std::vector<int>{0xF7, 0xF5, 0xF3, 0xF1, 0xEE, 0xEA, 0xE4, 0xD8, 0x58, 0x64, 0x6A,
                              0x6E, 0x71, 0x73, 0x75, 0x77}));
}

TEST(Quantize, Mxfp8GoldenScales) {
  const std::pair<float, int> golden[] = {
      {448, 127},   {449, 128}, {447, 127},
      {224, 126},   {6, 121},   {1, 119},
      {1e-30f, 19}, {0, 0},     {std::numeric_limits<float>::max(), 247}};
  for (const auto& [amax, e] : golden) {
    Tensor x(DType::kFloat32, {32, 1});
    x.data<float>()[5] = -amax;
    const Guarded out(QuantSpec::of(Format::kMxfp8), 32, 1, {false, true});
    quantize(x, out, {}, Stream());
    EXPECT_EQ(byte_values(out.view().col_scales), (std::vector<int>{e})) << amax;
  }
}

TEST(Quantize, Nvfp4GoldenScales) {
  struct Golden {
    float tensor, block;
    int scale;
  };
  for (const auto& [tensor, block, scale] :
       {Golden{1, 1, 0x7E}, Golden{1, .5f, 0x76}, Golden{4, 1, 0x6E}, Golden{10, .001f, 0x13},
        Golden{10, 1e-5f, 0x00}, Golden{100, 3, 0x55}}) {
    Tensor x(DType::kFloat32, {1, 32});
    x.data<float>()[2] = tensor;
    x.data<float>()[20] = -block;
    const Guarded out(QuantSpec::of(Format::kNvfp4), 1, 32, {true, false});
    quantize(x, out, {}, Stream());
    EXPECT_EQ(byte_values(out.view().row_scales), (std::vector<int>{0x7E, scale}));
  }
}

TEST(Quantize, RotatedOnes) {
  Tensor x(DType::kFloat32, {16, 1});
  for (int i = 0; i < 16; ++i) x.data<float>()[i] = 1;
  QuantSpec spec = QuantSpec::of(Format::kNvfp4);
  spec.rht_col = true;
  const Guarded out(spec, 16, 1, {true, true});
  quantize(x, out, {}, Stream());
  EXPECT_EQ(out.view().amax.data<float>()[0], 1.0f);
  EXPECT_EQ(out.view().amax.data<float>()[1], 2.0f);
  // -1 0 1 0 1 0 -1 0 1 2 1 0 1 0 1 -2, times 3.
  EXPECT_EQ(byte_values(out.view().col_data),
            (std::vector<int>{0x0D, 0x05, 0x05, 0x0D, 0x75, 0x05, 0x05, 0xF5}));
}

TEST(Quantize, FillsTheRotatedTail) {
  // One row: the rotation spreads it over all 16 places of the block.
  Tensor x(DType::kBFloat16, {1, 2});
  x.data<bf16>()[0] = bf16(4.0f);
  QuantSpec spec = QuantSpec::of(Format::kNvfp4);
  spec.rht_col = true;
  const Guarded out(spec, 1, 2, {false, true});
  quantize(x, out, {}, Stream());
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(bytes(out.view().col_data)[i] & 0x77, 0x77);
    EXPECT_EQ(bytes(out.view().col_data)[8 + i] & 0x77, 0);
  }
}

TEST(Quantize, NanAndInfinityBreakTheirBlockAndTheFlagSaysSo) {
  for (const float bad : {kNan, -kInf}) {
    Tensor x(DType::kFloat32, {2, 64});
    for (int i = 0; i < 128; ++i) x.data<float>()[i] = 1;
    x.data<float>()[64 + 40] = bad;

    const Guarded mx(QuantSpec::of(Format::kMxfp8), 2, 64, {true, false});
    quantize(x, mx, {}, Stream());
    EXPECT_EQ(byte_values(mx.view().row_scales), (std::vector<int>{119, 119, 119, 0xFF}));
    for (int i = 0; i < 128; ++i) EXPECT_EQ(bytes(mx.view().row_data)[i] == 0x7F, i >= 96);
    EXPECT_EQ(mx.flag(), kFlagNonFinite);

    const Guarded fp4(QuantSpec::of(Format::kNvfp4), 2, 64, {true, false});
    quantize(x, fp4, {}, Stream());
    EXPECT_EQ(float_bits(fp4.view().tensor_scale, 0), 0x7FFFFFFFu);
    for (int v : byte_values(fp4.view().row_scales)) EXPECT_EQ(v, 0x7F);
    for (int v : byte_values(fp4.view().row_data)) EXPECT_EQ(v, 0x77);
    EXPECT_EQ(fp4.flag(), kFlagNonFinite);

    const Guarded fp8(QuantSpec::of(Format::kFp8Tensor), 2, 64, {true, true});
    quantize(x, fp8, {}, Stream());
    EXPECT_EQ(float_bits(fp8.view().tensor_scale, 0), 0x7FFFFFFFu);
    EXPECT_EQ(float_bits(fp8.view().tensor_scale, 1), 0x7FFFFFFFu);
    for (int v : byte_values(fp8.view().col_data)) EXPECT_EQ(v, 0x7F);
    EXPECT_EQ(fp8.flag(), kFlagNonFinite);
  }
}

TEST(Quantize, GivenAmaxSaturatesInfinityAndKeepsNan) {
  Tensor x(DType::kFloat32, {1, 3});
  x.data<float>()[0] = -kInf;
  x.data<float>()[1] = kNan;
  x.data<float>()[2] = 0.5f;
  const Guarded out(QuantSpec::of(Format::kFp8Tensor), 1, 3, {true, true});
  out.view().amax.data<float>()[0] = 1;
  QuantizeOptions options;
  options.amax_given = true;
  quantize(x, out, options, Stream());
  EXPECT_EQ(byte_values(out.view().row_data), (std::vector<int>{0xFE, 0x7F, 0x76}));
  EXPECT_EQ(out.view().amax.data<float>()[1], 1.0f);
  EXPECT_EQ(out.flag(), kFlagNonFinite);
}

TEST(Quantize, PadsStayZeroUnderANanScale) {
  Tensor x(DType::kFloat32, {1, 3});
  x.data<float>()[1] = kNan;
  const Guarded out(QuantSpec::of(Format::kNvfp4), 1, 3, {true, true});
  quantize(x, out, {}, Stream());
  EXPECT_EQ(byte_values(out.view().row_data), (std::vector<int>{0x77, 0x07, 0, 0, 0, 0, 0, 0}));
  for (int i = 0; i < 24; ++i) EXPECT_EQ(bytes(out.view().col_data)[i], i % 8 ? 0 : 0x07);
}

TEST(Quantize, EmptyTensors) {
  for (const SpecCase& c : spec_cases()) {
    for (const Shape shape : {Shape{0, 40}, Shape{40, 0}}) {
      const Input x(DType::kFloat32, shape, Data::kNormal);
      const Guarded out(c.spec, shape.rows, shape.cols, {true, !c.spec.row_scaled});
      quantize(x, out, test_options(), Stream());
      EXPECT_TRUE(out.guards_intact());
      if (!out.view().amax.defined()) continue;
      for (int64_t i = 0; i < out.view().amax.numel(); ++i) {
        EXPECT_EQ(float_bits(out.view().amax, i), 0u) << c.name;
      }
    }
  }
}

// --- delayed scaling, skip, amax

TEST(Quantize, DelayedScaleCastsAndTheAmaxGoesToTheStep) {
  Tensor x(DType::kFloat32, {3, 20});
  fill(x, Data::kNormal, 4);
  Tensor scale(DType::kFloat32, {1}), scale_inv(DType::kFloat32, {1}), step(DType::kFloat32, {1});
  *scale.data<float>() = 64;
  *scale_inv.data<float>() = 1.0f / 64;
  const DelayedScaling state{{}, {}, scale, scale_inv, step};
  QuantizeOptions options;
  options.delayed = &state;
  const Guarded out(QuantSpec::of(Format::kFp8Tensor), 3, 20, {true, true});
  quantize(x, out, options, Stream());
  float amax = 0;
  for (int i = 0; i < 60; ++i) {
    const float v = x.data<float>()[i];
    amax = std::max(amax, std::fabs(v));
    EXPECT_EQ(bytes(out.view().row_data)[i], E4M3::encode(v * 64));
    EXPECT_EQ(bytes(out.view().col_data)[i % 20 * 3 + i / 20], E4M3::encode(v * 64));
  }
  EXPECT_EQ(*step.data<float>(), amax);
  EXPECT_EQ(out.view().tensor_scale.data<float>()[0], 1.0f / 64);
  EXPECT_EQ(out.view().tensor_scale.data<float>()[1], 1.0f / 64);
  // A smaller step amax than what was seen before stays out.
  *step.data<float>() = 1e6f;
  quantize(x, out, options, Stream());
  EXPECT_EQ(*step.data<float>(), 1e6f);
}

TEST(Quantize, SkipChangesNothing) {
  const Input x(DType::kBFloat16, {20, 40}, Data::kNormal);
  Tensor skip(DType::kUInt32, {1});
  *skip.data<uint32_t>() = 5;
  QuantizeOptions options = test_options();
  options.skip = skip;
  for (const SpecCase& c : spec_cases()) {
    const Directions both{true, !c.spec.row_scaled};
    const Guarded out(c.spec, 20, 40, both), untouched(c.spec, 20, 40, both);
    quantize(x, out, options, Stream());
    if (out.view().amax.defined()) compute_amax(x, out, options, Stream());
    EXPECT_EQ(difference(out, untouched), "") << c.name;
  }
}

TEST(ComputeAmax, IsWhatQuantizeMeasures) {
  for (const SpecCase& c : spec_cases()) {
    if (!is_tensor_scaled(c.spec.format)) continue;
    for (const Directions wanted : {Directions{true, true}, {true, false}, {false, true}}) {
      if (wanted.col && c.spec.row_scaled) continue;
      for (const Data data : kAllData) {
        const Input x(DType::kFloat32, {37, 83}, data, 3);
        const Guarded measured(c.spec, 37, 83, wanted), whole(c.spec, 37, 83, wanted);
        compute_amax(x, measured, test_options(), Stream());
        quantize(x, whole, test_options(), Stream());
        // The amax of a direction that is not asked for is left alone, by both.
        EXPECT_EQ(difference("amax", measured.view().amax, whole.view().amax), "") << c.name;
        // Given back, it gives the same tensor.
        QuantizeOptions options = test_options();
        options.amax_given = true;
        quantize(x, measured, options, Stream());
        EXPECT_EQ(difference(measured, whole), "") << c.name << name(data);
      }
    }
  }
}

// The amax of the tensor is given, those of blocks are measured all the same.
TEST(ComputeAmax, GivenItDoesNotSaturateBlocksOfNvfp4) {
  Tensor x(DType::kFloat32, {1, 32});
  for (int i = 0; i < 32; ++i) x.data<float>()[i] = 1;
  x.data<float>()[3] = std::numeric_limits<float>::infinity();
  const Guarded out(QuantSpec::of(Format::kNvfp4), 1, 32, {true, false});
  *out.view().amax.data<float>() = 1;
  QuantizeOptions options;
  options.amax_given = true;
  quantize(x, out, options, Stream());
  const auto* scales = static_cast<const uint8_t*>(out.view().row_scales.raw());
  const auto* codes = static_cast<const uint8_t*>(out.view().row_data.raw());
  EXPECT_EQ(scales[0], 0x7F);
  EXPECT_EQ(scales[1], 0x7E);
  for (int i = 0; i < 8; ++i) EXPECT_EQ(codes[i], 0x77) << i;
  EXPECT_EQ(*out.view().flags.data<uint32_t>() & kFlagNonFinite, kFlagNonFinite);
}

TEST(Quantize, RotationReadsFp32AsItsBf16) {
  const Input x(DType::kFloat32, {70, 40}, Data::kNormal);
  Tensor rounded(DType::kBFloat16, {70, 40});
  for (int i = 0; i < 2800; ++i) rounded.data<bf16>()[i] = bf16(x.view().data<float>()[i]);
  QuantSpec spec = QuantSpec::of(Format::kNvfp4);
  spec.rht_col = true;
  const Guarded a(spec, 70, 40, {false, true}), b(spec, 70, 40, {false, true});
  quantize(x, a, {}, Stream());
  quantize(rounded, b, {}, Stream());
  EXPECT_EQ(difference(a, b), "");
}

// --- fast path, directions, threads, modes

class QuantizeSpecs : public testing::TestWithParam<SpecCase> {};
INSTANTIATE_TEST_SUITE_P(All, QuantizeSpecs, testing::ValuesIn(spec_cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(QuantizeSpecs, FastPathEqualsReferenceOnAllShapes) {
  const SpecCase& c = GetParam();
  size_t turn = 0;
  for (const Shape& shape : small_shapes()) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
      for (const Directions wanted : directions_of(c.spec)) {
        for (const Data data : kAllData) {
          // A share of the product, in which every pair of the table occurs.
          if (!full_tests() && turn++ % 11 != 0) continue;
          const Input x(dtype, shape, data, static_cast<int64_t>(turn % 3));
          ASSERT_EQ(compare(x, c.spec, wanted, test_options()), "")
              << name(shape) << " " << name(dtype) << " " << name(data) << " row " << wanted.row
              << " col " << wanted.col;
        }
      }
    }
  }
}

TEST(Quantize, FastPathEqualsReferenceOnLargeShapes) {
  const auto specs = spec_cases();
  for (size_t i = 0; i < specs.size(); ++i) {
    // One spec in seven on one tensor that is large enough for several tasks.
    if (!full_tests() && i % 7 != 0) continue;
    for (const Shape& shape : full_tests() ? large_shapes() : std::vector<Shape>{{300, 2500}}) {
      const Input x(DType::kBFloat16, shape, Data::kNormal, 8);
      for (const Directions wanted : directions_of(specs[i].spec)) {
        ASSERT_EQ(compare(x, specs[i].spec, wanted, test_options()), "")
            << specs[i].name << " " << name(shape);
      }
    }
  }
}

TEST_P(QuantizeSpecs, DirectionsAloneAreHalvesOfBoth) {
  const QuantSpec& spec = GetParam().spec;
  if (spec.row_scaled) return;
  for (const Data data : {Data::kNormal, Data::kOneNan, Data::kRandomBits}) {
    const Input x(DType::kFloat32, {150, 277}, data);
    const Guarded both(spec, 150, 277, {true, true}), row(spec, 150, 277, {true, false}),
        col(spec, 150, 277, {false, true});
    for (const Guarded* g : {&both, &row, &col}) quantize(x, *g, test_options(), Stream());
    EXPECT_EQ(difference("row_data", row.view().row_data, both.view().row_data), "");
    EXPECT_EQ(difference("row_scales", row.view().row_scales, both.view().row_scales), "");
    EXPECT_EQ(difference("col_data", col.view().col_data, both.view().col_data), "");
    if (is_tile(spec.format)) {
      EXPECT_EQ(difference("row_scales", col.view().row_scales, both.view().row_scales), "");
    } else {
      EXPECT_EQ(difference("col_scales", col.view().col_scales, both.view().col_scales), "");
    }
    for (int i = 0; i < 2; ++i) {
      const Guarded& half = i == 0 ? row : col;
      EXPECT_EQ(float_bits(half.view().tensor_scale, i), float_bits(both.view().tensor_scale, i));
      EXPECT_EQ(float_bits(half.view().tensor_scale, 1 - i) == 0xA5A5A5A5u,
                spec.format != Format::kMxfp8Tile32);
      if (!both.view().amax.defined()) continue;
      EXPECT_EQ(float_bits(half.view().amax, i), float_bits(both.view().amax, i));
      EXPECT_EQ(float_bits(half.view().amax, 1 - i), 0xA5A5A5A5u);
    }
  }
}

TEST_P(QuantizeSpecs, BitsDoNotDependOnThreads) {
  const QuantSpec& spec = GetParam().spec;
  const Input x(DType::kBFloat16, {400, 600}, Data::kNormal);
  const Directions both{true, !spec.row_scaled};
  const Guarded one(spec, 400, 600, both), many(spec, 400, 600, both);
  {
    const ThreadBudget budget(1);
    quantize(x, one, test_options(), Stream());
  }
  const ThreadBudget budget(5);
  quantize(x, many, test_options(), Stream());
  EXPECT_EQ(difference(one, many), "");
}

#if defined(__x86_64__)
TEST_P(QuantizeSpecs, AFlushModeOfTheCallerIsIgnoredAndComesBack) {
  const QuantSpec& spec = GetParam().spec;
  const Directions both{true, !spec.row_scaled};
  for (const Data data : {Data::kSubnormalAmax, Data::kAmaxBelow8em36, Data::kNormal}) {
    const Input x(DType::kFloat32, {40, 70}, data);
    const Guarded usual(spec, 40, 70, both), flushed(spec, 40, 70, both);
    quantize(x, usual, test_options(), Stream());
    const unsigned before = _mm_getcsr();
    const unsigned mode = before | 0x8040u | 0x6000u;  // FTZ, DAZ, towards zero
    _mm_setcsr(mode);
    quantize(x, flushed, test_options(), Stream());
    const unsigned after = _mm_getcsr();
    _mm_setcsr(before);
    EXPECT_EQ(after, mode);
    EXPECT_EQ(difference(usual, flushed), "") << name(data);
  }
}
#endif

// --- stochastic rounding

// The rows x cols part at (row0, col0) of what `whole` holds, quantized alone, is that part.
TEST(StochasticRounding, DoesNotDependOnSharding) {
  QuantSpec spec = QuantSpec::of(Format::kMxfp8);
  spec.rounding = Rounding::kStochastic;
  const Input x(DType::kFloat32, {128, 192}, Data::kNormal);
  const Guarded whole(spec, 128, 192, {true, true});
  quantize(x, whole, test_options(), Stream());
  const int64_t row0 = 64, col0 = 96, rows = 64, cols = 96;
  const TensorView part = x.view().slice(0, row0, row0 + rows).slice(1, col0, col0 + cols);
  const Guarded shard(spec, rows, cols, {true, true});
  QuantizeOptions options = test_options();
  options.row0 = row0;
  options.col0 = col0;
  options.full_rows = 128;
  options.full_cols = 192;
  quantize(part, shard, options, Stream());
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      const int64_t at = (row0 + r) * 192 + col0 + c;
      ASSERT_EQ(bytes(shard.view().row_data)[r * cols + c], bytes(whole.view().row_data)[at]);
      ASSERT_EQ(bytes(shard.view().col_data)[r * cols + c], bytes(whole.view().col_data)[at]);
    }
  }
}

TEST(StochasticRounding, DrawsDifferAndTheirMeanBeatsNearest) {
  QuantSpec spec = QuantSpec::of(Format::kNvfp4);
  constexpr int64_t kRows = 64, kCols = 256, kDraws = 50;
  const Input x(DType::kFloat32, {kRows, kCols}, Data::kNormal);
  const auto values = [&](const Guarded& q) {
    std::vector<double> out;
    for (int64_t i = 0; i < kRows * kCols; ++i) {
      const float code = E2M1::decode(E2M1::unpack(bytes(q.view().row_data)[i / 2], i % 2));
      out.push_back(double{code} * E4M3::decode(bytes(q.view().row_scales)[i / 16]) *
                    q.view().tensor_scale.data<float>()[0]);
    }
    return out;
  };
  const auto error = [&](const std::vector<double>& v) {
    double sum = 0;
    for (size_t i = 0; i < v.size(); ++i) sum += std::pow(v[i] - x.view().data<float>()[i], 2);
    return std::sqrt(sum / static_cast<double>(v.size()));
  };
  const Guarded nearest(spec, kRows, kCols, {true, false});
  quantize(x, nearest, {}, Stream());
  spec.rounding = Rounding::kStochastic;
  std::vector<double> mean(kRows * kCols), first;
  RngState rng = kTestRng;
  QuantizeOptions options = test_options();
  options.rng = &rng;
  for (rng.draw = 0; rng.draw < kDraws; ++rng.draw) {
    const Guarded random(spec, kRows, kCols, {true, false});
    quantize(x, random, options, Stream());
    const std::vector<double> v = values(random);
    if (rng.draw == 1) {
      EXPECT_NE(v, first);
    }
    first = v;
    for (size_t i = 0; i < v.size(); ++i) mean[i] += v[i] / kDraws;
  }
  EXPECT_LT(error(mean), 0.5 * error(values(nearest)));
  EXPECT_GT(error(first), error(values(nearest)));
}

// --- many tensors, deferred streams, errors

TEST(QuantizeMany, EqualsOneByOne) {
  std::vector<Input> inputs;
  std::vector<Guarded> together, alone;
  std::vector<QuantizeItem> items;
  const std::vector<SpecCase> specs = spec_cases();
  for (size_t i = 0; i < 3 * specs.size(); ++i) {
    const QuantSpec& spec = specs[i % specs.size()].spec;
    const Shape shape{static_cast<int64_t>(i * 7 % 150), static_cast<int64_t>(i * 13 % 300)};
    const DType dtype = i % 2 ? DType::kFloat32 : DType::kBFloat16;
    inputs.emplace_back(dtype, shape, kAllData[i % std::size(kAllData)]);
    together.emplace_back(spec, shape.rows, shape.cols, Directions{true, !spec.row_scaled});
    alone.emplace_back(spec, shape.rows, shape.cols, Directions{true, !spec.row_scaled});
    QuantizeItem item{inputs.back(), together.back(), test_options()};
    item.options.tensor_id = static_cast<uint32_t>(i);
    quantize(item.x, alone.back(), item.options, Stream());
    items.push_back(item);
  }
  const QuantizeTable table(items);
  const ThreadBudget budget(3);
  Stream stream = Stream::deferred();
  quantize_many(table, stream);
  EXPECT_EQ(together[0].view().row_data.numel(), alone[0].view().row_data.numel());
  stream.synchronize();
  for (size_t i = 0; i < items.size(); ++i) {
    ASSERT_EQ(difference(together[i], alone[i]), "") << i << specs[i % specs.size()].name;
    ASSERT_TRUE(together[i].guards_intact());
  }
}

TEST(Quantize, ErrorsNameOperationArgumentAndValue) {
  const Input x(DType::kFloat32, {32, 48}, Data::kNormal);
  const QuantizedTensor out(QuantSpec::of(Format::kNvfp4), 32, 48, {true, true});
  const auto run = [&](QuantizedView view, QuantizeOptions options = {}) {
    return kind_and_error_of([&] { quantize(x, view, options, Stream()); });
  };
  EXPECT_EQ(run(out), "no error");
  QuantizedView view = out;
  view.spec.rounding = Rounding::kStochastic;
  EXPECT_NE(run(view).find("quantize: stochastic rounding without rng"), std::string::npos);
  view = out;
  view.spec.pow2_scales = true;
  EXPECT_NE(run(view).find("pow2_scales with nvfp4"), std::string::npos);
  view = out;
  view.row_scales = view.row_scales.slice(0, 0, 31);
  EXPECT_NE(run(view).find("quantize: row_scales is"), std::string::npos);
  view = out;
  view.col_scales = {};
  EXPECT_NE(run(view).find("quantize: col_scales are missing"), std::string::npos);
  QuantizeOptions options = test_options();
  options.row0 = 8;
  options.full_rows = 40;
  EXPECT_NE(run(out, options).find("row0=8 must be a multiple of 16"), std::string::npos);
  options.row0 = 16;
  EXPECT_NE(run(out, options).find("full_rows=40"), std::string::npos);
  EXPECT_NE(kind_and_error_of([&] {
              QuantSpec spec = QuantSpec::of(Format::kNvfp4);
              spec.row_scaled = true;
              quantized_sizes(spec, 4, 4, {true, true});
            }).find("row_scaled has no col direction"),
            std::string::npos);
}

}  // namespace
}  // namespace moiety::quant
