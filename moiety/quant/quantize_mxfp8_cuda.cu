#include "moiety/quant/quantize_launch.cuh"
#include "moiety/quant/quantize_tiles.cuh"

namespace moiety::quant::device {

void launch_mxfp8(const CastKind& kind, const Source& source, int64_t blocks,
                  const Stream& stream) {
  with_kernel_types(kind, [&](auto element, auto stochastic) {
    using T = decltype(element);
    constexpr Format F = Format::kMxfp8;
    if (kind.format == Format::kMxfp8Tile32) {
      launch("quantize", cast_tiles<Format::kMxfp8Tile32, T, stochastic.value, false>,
             {blocks, kThreads}, stream, source);
    } else if (kind.col) {
      launch("quantize", cast_blocks<F, T, stochastic.value, true>,
             {blocks, kThreads, ColumnTile<F, T>::kBytes}, stream, source);
    } else {
      launch("quantize", cast_blocks<F, T, stochastic.value, false>, {blocks, kThreads}, stream,
             source);
    }
  });
}

}  // namespace moiety::quant::device
