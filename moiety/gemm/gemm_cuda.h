// Dense products on GPUs. Internal to moiety/gemm.
#pragma once

#include "moiety/gemm/gemm_block.h"

namespace moiety::gemm {

// `block`: the whole product of args; the factors of its epilogue that args.a_scale and
// args.b_scale hold are read on the GPU.
void gemm_cuda(const GemmArgs& args, const BlockGemm& block, const Stream& stream);

// By cuBLASLt. False, and nothing is launched, if it has no algorithm that keeps the contract:
// operands other than bf16, block scales, an old value of another dtype than the output's or, in
// bf16, in the output itself, an empty reduction, odd addresses; or if it is not there. Which
// algorithm it has is looked up once for every shape, and depends on that, the GPU and cuBLASLt's
// version alone. Its workspace, one for each stream, is allocated at the stream's first product
// (also while that is captured) and kept until the process ends.
bool gemm_cublaslt(const BlockGemm& block, const Stream& stream);
inline constexpr int64_t kCublasLtWorkspace = int64_t{32}
                                              << 20;  // what NVIDIA recommends for Hopper

// Products by cuBLASLt can be had, or why not.
struct CublasLtStatus {
  bool available = false;
  std::string text;
};
const CublasLtStatus& cublaslt_status();

}  // namespace moiety::gemm
