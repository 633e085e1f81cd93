// Linked where CUDA is not built.
#include "moiety/base/gpu.h"
#include "moiety/quant/scale_layout_job.h"

namespace moiety::quant {

void convert_scales_cuda(const ScaleMatrix&, ScaleLayout, uint8_t*, const Stream&) {
  fail_without_cuda("convert_scales");
}
void compact_scales_cuda(const uint8_t*, ScaleLayout, const ScaleMatrix&, const Stream&) {
  fail_without_cuda("compact_scales");
}
void fp8_block_to_mxfp8_cuda(const ScaleMatrix&, int64_t, uint8_t*, uint32_t*, const Stream&) {
  fail_without_cuda("fp8_block_to_mxfp8");
}

}  // namespace moiety::quant
