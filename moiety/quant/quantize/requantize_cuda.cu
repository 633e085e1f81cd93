// The kernels that quantize values of codes.
#include "moiety/quant/quantize/quantize_kernels.cuh"

namespace moiety::quant::device {

std::span<const QuantizeLaunch> requantize_launches() { return launches_of<kRequantizeKernels>(); }

}  // namespace moiety::quant::device
