#include "moiety/quant/quantize/quantize_launch.cuh"
#include "moiety/quant/quantize/quantize_tiles.cuh"

namespace moiety::quant::device {
namespace {

template <Format F>
void launch_tiles(const CastKind& kind, const Source& source, int64_t blocks,
                  const Stream& stream) {
  with_kernel_types(kind, [&](auto element, auto stochastic) {
    using T = decltype(element);
    const auto kernel = kind.col ? cast_tiles<F, T, stochastic.value, true>
                                 : cast_tiles<F, T, stochastic.value, false>;
    launch("quantize", kernel, {blocks, kThreads, 0, source.early}, stream, source);
  });
}

}  // namespace

void launch_fp8(const CastKind& kind, const Source& source, int64_t blocks, const Stream& stream) {
  if (kind.format == Format::kFp8Tensor) {
    return launch_tiles<Format::kFp8Tensor>(kind, source, blocks, stream);
  }
  if (kind.format == Format::kFp8Block128x128) {
    return launch_tiles<Format::kFp8Block128x128>(kind, source, blocks, stream);
  }
  constexpr Format F = Format::kFp8Block1x128;
  with_kernel_types(kind, [&](auto element, auto stochastic) {
    using T = decltype(element);
    launch_blocks<F, T, stochastic.value>(kind, source, blocks, stream);
  });
}

}  // namespace moiety::quant::device
