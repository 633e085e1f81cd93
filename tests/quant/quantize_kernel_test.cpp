// Which kernel a GPU takes for a quantization is decided without one, so it is tested without one.
#include "moiety/quant/quantize/quantize_kernel.h"

#include <algorithm>

#include "tests/quant/cases.h"

namespace moiety::quant {
namespace {

std::vector<QuantizeKernel> all_kernels() {
  std::vector<QuantizeKernel> out(kFp8Kernels.begin(), kFp8Kernels.end());
  out.insert(out.end(), kMxfp8Kernels.begin(), kMxfp8Kernels.end());
  out.insert(out.end(), kNvfp4Kernels.begin(), kNvfp4Kernels.end());
  out.insert(out.end(), kRequantizeKernels.begin(), kRequantizeKernels.end());
  return out;
}

int64_t count(const std::vector<QuantizeKernel>& kernels, const QuantizeKernel& k) {
  return std::count(kernels.begin(), kernels.end(), k);
}

// The specs that a tensor can have.
std::vector<QuantSpec> legal_specs() {
  std::vector<QuantSpec> out;
  for (int format = 0; format <= static_cast<int>(Format::kNvfp4Tile16); ++format) {
    for (int bits = 0; bits < 8; ++bits) {
      QuantSpec spec = QuantSpec::of(static_cast<Format>(format));
      spec.rounding = bits & 1 ? Rounding::kStochastic : Rounding::kNearest;
      spec.row_scaled = (bits & 2) != 0;
      spec.rht_col = (bits & 4) != 0;
      try {
        check_spec("legal_specs", spec);
      } catch (const Error&) {
        continue;
      }
      out.push_back(spec);
    }
  }
  return out;
}

// visit(description) of every job that quantize() and requantize_col() take of these tensors.
template <class Visit>
void for_legal_jobs(Visit&& visit) {
  static const RngState rng{};
  QuantizeOptions options;
  options.rng = &rng;
  for (const QuantSpec& spec : legal_specs()) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const Directions wanted : {Directions{true, false}, {false, true}, {true, true}}) {
        if (spec.row_scaled && wanted.col) continue;
        const Tensor x(dtype, {32, 48});
        const QuantizedTensor out(spec, 32, 48, wanted);
        QuantizeTraits traits = traits_of(make_quantize_job("quantize", x, out.view(), options));
        visit(traits);
        traits.coded = dtype == DType::kBFloat16 && traits.col && !wanted.row;
        if (traits.coded) visit(traits);
      }
    }
  }
}

TEST(QuantizeKernel, EveryLegalDescriptionHasOneKernelAPass) {
  const std::vector<QuantizeKernel> all = all_kernels();
  int64_t descriptions = 0;
  for_legal_jobs([&](const QuantizeTraits& traits) {
    ++descriptions;
    EXPECT_EQ(count(all, choose_kernel(QuantizePass::kCast, traits)), 1) << name(traits.format);
    EXPECT_EQ(count(all, choose_kernel(QuantizePass::kMeasure, traits)), 1) << name(traits.format);
  });
  EXPECT_GE(descriptions, 80);
}

TEST(QuantizeKernel, NoKernelIsInTheListsThatNobodyCalls) {
  std::vector<QuantizeKernel> chosen;
  for_legal_jobs([&](const QuantizeTraits& traits) {
    chosen.push_back(choose_kernel(QuantizePass::kCast, traits));
    chosen.push_back(choose_kernel(QuantizePass::kMeasure, traits));
  });
  for (const QuantizeKernel& k : all_kernels()) {
    EXPECT_GE(count(chosen, k), 1)
        << name(k.format) << " " << name(k.dtype) << ", family " << static_cast<int>(k.family)
        << ", stochastic " << k.stochastic << ", col " << k.col;
  }
}

TEST(QuantizeKernel, ACastTakesTheFormatTypeAndRoundingThatItIsAskedFor) {
  for_legal_jobs([&](const QuantizeTraits& traits) {
    const QuantizeKernel cast = choose_kernel(QuantizePass::kCast, traits);
    EXPECT_EQ(cast.format, traits.format);
    EXPECT_EQ(cast.dtype, traits.dtype);
    EXPECT_EQ(cast.stochastic, traits.stochastic);
    EXPECT_EQ(cast.col, traits.col);
    const QuantizeKernel measure = choose_kernel(QuantizePass::kMeasure, traits);
    EXPECT_EQ(measure.dtype, traits.dtype);
    EXPECT_EQ(measure.col, traits.rotated && traits.want_col);
    EXPECT_EQ(cast.coded, traits.coded);
    EXPECT_EQ(measure.coded, traits.coded);
  });
}

TEST(QuantizeKernel, WhatHasNoKernelIsNamed) {
  const auto expect = [](QuantizePass pass, const QuantizeTraits& traits, const char* words) {
    try {
      choose_kernel(pass, traits);
      FAIL() << words;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUnsupported);
      EXPECT_STREQ(error.what(), words);
    }
  };
  using enum QuantizePass;
  expect(kCast, {.format = Format::kMxfp8, .dtype = DType::kFloat64, .want_row = true},
         "quantize: no kernel for mxfp8 from float64");
  expect(kCast, {.format = Format::kMxfp8Tile32, .col = true, .want_col = true},
         "quantize: no kernel for mxfp8_tile32 from float32, with col codes");
  expect(kCast, {.format = Format::kFp8Tensor, .row_scaled = true},
         "quantize: no kernel for fp8_tensor from float32, row_scaled");
  expect(kMeasure, {.format = Format::kNvfp4, .dtype = DType::kFloat16},
         "compute_amax: no kernel for nvfp4 from float16");
  expect(kCast, {.format = Format::kMxfp8Tile32, .dtype = DType::kBFloat16, .coded = true},
         "quantize: no kernel for mxfp8_tile32 from codes");
}

}  // namespace
}  // namespace moiety::quant
