#include "moiety/quant/quantize_launch.cuh"
#include "moiety/quant/quantize_rows.cuh"
#include "moiety/quant/quantize_tiles.cuh"

namespace moiety::quant::device {

void launch_nvfp4(const CastKind& kind, const Source& source, int64_t blocks,
                  const Stream& stream) {
  with_kernel_types(kind, [&](auto element, auto stochastic) {
    using T = decltype(element);
    constexpr Format F = Format::kNvfp4;
    if (kind.format == Format::kNvfp4Tile16) {
      const auto kernel = kind.col ? cast_tiles<Format::kNvfp4Tile16, T, stochastic.value, true>
                                   : cast_tiles<Format::kNvfp4Tile16, T, stochastic.value, false>;
      launch("quantize", kernel, {blocks, kThreads}, stream, source);
    } else if (kind.col) {
      launch("quantize", cast_blocks<F, T, stochastic.value, true>,
             {blocks, kThreads, ColumnTile<F, T>::kBytes}, stream, source);
    } else {
      launch("quantize", cast_blocks<F, T, stochastic.value, false>, {blocks, kThreads}, stream,
             source);
    }
  });
}

void launch_scaled_rows(const CastKind& kind, const Source& source, bool cast, int64_t blocks,
                        const Stream& stream) {
  with_kernel_types(kind, [&](auto element, auto stochastic) {
    using T = decltype(element);
    launch("quantize", cast_scaled_rows<T, stochastic.value>, {blocks, kThreads}, stream, source,
           cast);
  });
}

void launch_measure(const CastKind& kind, bool rotated, const Source& source, int64_t blocks,
                    const Stream& stream) {
  const auto with = [&](auto element) {
    using T = decltype(element);
    if (rotated) {
      launch("compute_amax", measure_tiles<T, true>,
             {blocks, kThreads, ColumnTile<Format::kNvfp4, T>::kBytes}, stream, source);
    } else {
      launch("compute_amax", measure_tiles<T, false>, {blocks, kThreads}, stream, source);
    }
  };
  kind.dtype == DType::kFloat32 ? with(float{}) : with(bf16{});
}

}  // namespace moiety::quant::device
