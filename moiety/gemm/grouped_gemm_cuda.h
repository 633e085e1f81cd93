// Grouped products on GPUs; split sizes are read there. Internal to moiety/gemm.
#pragma once

#include "moiety/gemm/grouped_gemm.h"

namespace moiety::gemm {

// The caller records faults.
void grouped_gemm_cuda(const GroupedGemmArgs& args, const Stream& stream);
void grouped_bias_grad_cuda(const GroupedBiasGradArgs& args, const Stream& stream);
void grouped_scale_grad_cuda(const GroupedScaleGradArgs& args, const Stream& stream);

// The device's version of record_faults (grouped_tensor.h); `more` is another tensor with rows of
// these groups.
void record_faults_cuda(const Groups& groups, OperationId operation, const GroupedTensor& rows,
                        const GroupedTensor& more, const Stream& stream);

}  // namespace moiety::gemm
