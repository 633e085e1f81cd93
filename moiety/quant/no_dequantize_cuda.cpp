// Linked where CUDA is not built.
#include "moiety/base/gpu.h"
#include "moiety/quant/convert/dequantize_job.h"

namespace moiety::quant {

void dequantize_cuda(const DequantizeJob&, const Stream&) { fail_without_cuda("dequantize"); }

}  // namespace moiety::quant
