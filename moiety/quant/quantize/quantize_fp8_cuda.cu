#include "moiety/quant/quantize/quantize_kernels.cuh"

namespace moiety::quant::device {

std::span<const QuantizeLaunch> fp8_launches() { return launches_of<kFp8Kernels>(); }

}  // namespace moiety::quant::device
