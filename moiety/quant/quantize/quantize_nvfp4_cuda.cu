#include "moiety/quant/quantize/quantize_launch.cuh"
#include "moiety/quant/quantize/quantize_rows.cuh"
#include "moiety/quant/quantize/quantize_tiles.cuh"

namespace moiety::quant::device {

void launch_nvfp4(const CastKind& kind, const Source& source, int64_t blocks,
                  const Stream& stream) {
  with_kernel_types(kind, [&](auto element, auto stochastic) {
    using T = decltype(element);
    if (kind.format == Format::kNvfp4Tile16) {
      const auto kernel = kind.col ? cast_tiles<Format::kNvfp4Tile16, T, stochastic.value, true>
                                   : cast_tiles<Format::kNvfp4Tile16, T, stochastic.value, false>;
      launch("quantize", kernel, {blocks, kThreads, 0, source.early}, stream, source);
    } else {
      launch_blocks<Format::kNvfp4, T, stochastic.value>(kind, source, blocks, stream);
    }
  });
}

void launch_scaled_rows(const CastKind& kind, const Source& source, bool cast, int64_t blocks,
                        const Stream& stream) {
  with_kernel_types(kind, [&](auto element, auto stochastic) {
    using T = decltype(element);
    launch("quantize", cast_scaled_rows<T, stochastic.value>, {blocks, kThreads, 0, source.early},
           stream, source, cast);
  });
}

void launch_measure(const CastKind& kind, bool rotated, const Source& source, int64_t blocks,
                    const Stream& stream) {
  const auto with = [&](auto element) {
    using T = decltype(element);
    launch("compute_amax", rotated ? measure_tiles<T, true> : measure_tiles<T, false>,
           {blocks, kThreads, 0, source.early}, stream, source);
  };
  kind.dtype == DType::kFloat32 ? with(float{}) : with(bf16{});
}

}  // namespace moiety::quant::device
