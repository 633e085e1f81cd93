#include "moiety/quant/quantize/quantize_kernels.cuh"

namespace moiety::quant::device {

std::span<const QuantizeLaunch> mxfp8_launches() { return launches_of<kMxfp8Kernels>(); }

}  // namespace moiety::quant::device
