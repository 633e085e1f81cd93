#include "moiety/quant/quantize/quantize_launch.cuh"
#include "moiety/quant/quantize/quantize_tiles.cuh"

namespace moiety::quant::device {

void launch_mxfp8(const CastKind& kind, const Source& source, int64_t blocks,
                  const Stream& stream) {
  with_kernel_types(kind, [&](auto element, auto stochastic) {
    using T = decltype(element);
    if (kind.format == Format::kMxfp8Tile32) {
      launch("quantize", cast_tiles<Format::kMxfp8Tile32, T, stochastic.value, false>,
             {blocks, kThreads, 0, source.early}, stream, source);
    } else {
      launch_blocks<Format::kMxfp8, T, stochastic.value>(kind, source, blocks, stream);
    }
  });
}

}  // namespace moiety::quant::device
