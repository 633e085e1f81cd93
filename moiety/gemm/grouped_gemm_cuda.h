// Grouped products on GPUs; split sizes are read there. Internal to moiety/gemm.
#pragma once

#include "moiety/gemm/activation_block.h"
#include "moiety/gemm/grouped_gemm.h"
#include "moiety/gemm/tile_gemm.h"

namespace moiety::gemm {

// The product of the groups from `first` on: of all if their matrices are packed, else of as many as
// have pointers and one row stride.
TileGemm tile_gemm_of(const GroupedGemmArgs& args, int64_t first);

// kFastest: those of sm90/grouped_sm90.h, where these take the product; else tile_gemm.h's.
enum class TileKernels { kFastest, kPlain };
// The caller records faults.
void grouped_gemm_cuda(const GroupedGemmArgs& args, TileKernels kernels, const Stream& stream);

// A product whose output is H, or dA if the activation has dh, with that activation in the same
// launch (sm90/fused.h). Bits are those of the two operations. `segments`: memory for those of dprob.
// Does nothing and returns false if the kernel does not take them.
bool grouped_activation_cuda(const GroupedGemmArgs& args, const ActivationBlock& activation,
                             std::byte* segments, const Stream& stream);
// dprob[r] = the sum of row r's segments of the canonical row dot.
void sum_segments_cuda(const Groups& groups, const float* segments, int64_t count, float* dprob,
                       const Stream& stream);

void grouped_bias_grad_cuda(const GroupedBiasGradArgs& args, const Stream& stream);
void grouped_scale_grad_cuda(const GroupedScaleGradArgs& args, const Stream& stream);

// The device's version of record_faults (grouped_tensor.h); `more` is another tensor with rows of
// these groups.
void record_faults_cuda(const Groups& groups, OperationId operation, const GroupedTensor& rows,
                        const GroupedTensor& more, const Stream& stream);

}  // namespace moiety::gemm
