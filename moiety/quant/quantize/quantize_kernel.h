// Which kernel quantizes a matrix on a GPU: a pure choice from lists of all kernels, so that tests
// hold it without a GPU. The .cu files make their tables from the same lists. Internal to
// moiety/quant.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "moiety/quant/quantize/quantize_job.h"

namespace moiety::quant {

// The two passes over X: its amax, then its codes.
enum class QuantizePass : uint8_t { kMeasure, kCast };

// All that kernels and launches depend on; jobs that agree in it share a launch.
struct QuantizeTraits {
  Format format = Format::kFp8Tensor;
  DType dtype = DType::kFloat32;  // of X
  bool stochastic = false, row_scaled = false;
  bool col = false;      // col codes are wanted
  bool rotated = false;  // the col direction is rotated
  bool want_row = false, want_col = false;
  bool measures_first = false;  // the amax comes from X, before anything is cast
  bool delayed = false;         // the scale is one of the steps before
  bool coded = false;           // X are codes, whose values are bf16 (requantize.h)
  friend bool operator==(const QuantizeTraits&, const QuantizeTraits&) = default;
};
QuantizeTraits traits_of(const QuantizeJob& job);

enum class QuantizeFamily : uint8_t {
  kMeasure,     // measure_tiles, for all formats; `col`: the rotated columns have their own amax
  kTiles,       // cast_tiles: col codes are the row codes transposed
  kBlocks,      // cast_row_blocks, with `col` cast_row_col_blocks
  kScaledRows,  // cast_scaled_rows: each row is a tensor of its own; measures too
};

struct QuantizeKernel {
  QuantizeFamily family;
  Format format;  // kMeasure: kFp8Tensor stands for all
  DType dtype;
  bool stochastic;
  bool col;
  bool coded = false;
  friend constexpr bool operator==(const QuantizeKernel&, const QuantizeKernel&) = default;
};

namespace detail {

// A family's kernels of one format: both dtypes, or values of codes, which are bf16; and both
// roundings if the family rounds.
struct QuantizeFamilyRow {
  QuantizeFamily family;
  Format format;
  bool col;
};
constexpr bool rounds(QuantizeFamily family) { return family != QuantizeFamily::kMeasure; }

template <size_t kCount, size_t kRows>
constexpr std::array<QuantizeKernel, kCount> list_kernels(const QuantizeFamilyRow (&rows)[kRows],
                                                          bool coded = false) {
  std::array<QuantizeKernel, kCount> out{};
  size_t n = 0;
  for (const QuantizeFamilyRow& row : rows) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      if (coded && dtype != DType::kBFloat16) continue;
      for (int stochastic = 0; stochastic < (rounds(row.family) ? 2 : 1); ++stochastic) {
        out.at(n++) = {row.family, row.format, dtype, stochastic != 0, row.col, coded};
      }
    }
  }
  if (n != kCount) throw "the list has another length";  // then it is no constant
  return out;
}

}  // namespace detail

// One list a source file: quantize_fp8_cuda.cu, quantize_mxfp8_cuda.cu, quantize_nvfp4_cuda.cu,
// requantize_cuda.cu.
inline constexpr auto kFp8Kernels = detail::list_kernels<24>({
    {QuantizeFamily::kTiles, Format::kFp8Tensor, false},
    {QuantizeFamily::kTiles, Format::kFp8Tensor, true},
    {QuantizeFamily::kTiles, Format::kFp8Block128x128, false},
    {QuantizeFamily::kTiles, Format::kFp8Block128x128, true},
    {QuantizeFamily::kBlocks, Format::kFp8Block1x128, false},
    {QuantizeFamily::kBlocks, Format::kFp8Block1x128, true},
});
inline constexpr auto kMxfp8Kernels = detail::list_kernels<12>({
    {QuantizeFamily::kTiles, Format::kMxfp8Tile32, false},
    {QuantizeFamily::kBlocks, Format::kMxfp8, false},
    {QuantizeFamily::kBlocks, Format::kMxfp8, true},
});
inline constexpr auto kNvfp4Kernels = detail::list_kernels<24>({
    {QuantizeFamily::kTiles, Format::kNvfp4Tile16, false},
    {QuantizeFamily::kTiles, Format::kNvfp4Tile16, true},
    {QuantizeFamily::kBlocks, Format::kNvfp4, false},
    {QuantizeFamily::kBlocks, Format::kNvfp4, true},
    {QuantizeFamily::kScaledRows, Format::kNvfp4, false},
    {QuantizeFamily::kMeasure, Format::kFp8Tensor, false},
    {QuantizeFamily::kMeasure, Format::kFp8Tensor, true},
});
inline constexpr auto kRequantizeKernels = detail::list_kernels<14>(
    {
        {QuantizeFamily::kTiles, Format::kFp8Tensor, true},
        {QuantizeFamily::kTiles, Format::kFp8Block128x128, true},
        {QuantizeFamily::kTiles, Format::kNvfp4Tile16, true},
        {QuantizeFamily::kBlocks, Format::kFp8Block1x128, true},
        {QuantizeFamily::kBlocks, Format::kMxfp8, true},
        {QuantizeFamily::kBlocks, Format::kNvfp4, true},
        {QuantizeFamily::kMeasure, Format::kFp8Tensor, false},
        {QuantizeFamily::kMeasure, Format::kFp8Tensor, true},
    },
    true);

// Throws Unsupported, naming what is asked for, if no list has a kernel for it.
QuantizeKernel choose_kernel(QuantizePass pass, const QuantizeTraits& traits);

}  // namespace moiety::quant
