// The kernels of NVFP4, and those that measure any format.
#include "moiety/quant/quantize/quantize_kernels.cuh"

namespace moiety::quant::device {

std::span<const QuantizeLaunch> nvfp4_launches() { return launches_of<kNvfp4Kernels>(); }

}  // namespace moiety::quant::device
