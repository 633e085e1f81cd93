// From a list of quantize_kernel.h to the table of its kernels, which this instantiates.
#pragma once

#include <array>
#include <type_traits>
#include <utility>

#include "moiety/quant/quantize/quantize_blocks.cuh"
#include "moiety/quant/quantize/quantize_launch.cuh"
#include "moiety/quant/quantize/quantize_rows.cuh"
#include "moiety/quant/quantize/quantize_tiles.cuh"

namespace moiety::quant::device {

template <const auto& kList, size_t kIndex>
QuantizeLaunch launch_of() {
  constexpr QuantizeKernel k = kList[kIndex];
  constexpr Format F = k.format;
  using T = std::conditional_t<k.dtype == DType::kFloat32, float, bf16>;
  if constexpr (k.family == QuantizeFamily::kMeasure) {
    return {k, measure_tiles<T, k.col, k.coded>};
  } else if constexpr (k.family == QuantizeFamily::kTiles) {
    return {k, cast_tiles<F, T, k.stochastic, k.col, k.coded>};
  } else if constexpr (k.family == QuantizeFamily::kScaledRows) {
    return {k, cast_scaled_rows<T, k.stochastic>};
  } else if constexpr (k.col) {
    constexpr ColumnPlan kPlan = kColumnPlan<F, T, k.stochastic>;
    return {k, cast_row_col_blocks<F, T, k.stochastic, k.coded>,
            kPlan.stages * StagedTile<T>::kBytes, kPlan.run};
  } else {
    return {k, cast_row_blocks<F, T, k.stochastic>};
  }
}

template <const auto& kList, size_t... kIndex>
std::span<const QuantizeLaunch> launches_of(std::index_sequence<kIndex...>) {
  static const std::array table = {launch_of<kList, kIndex>()...};
  return table;
}
template <const auto& kList>
std::span<const QuantizeLaunch> launches_of() {
  return launches_of<kList>(std::make_index_sequence<kList.size()>());
}

}  // namespace moiety::quant::device
