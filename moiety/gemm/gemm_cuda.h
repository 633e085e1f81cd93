// Dense products on GPUs. Internal to moiety/gemm.
#pragma once

#include "moiety/gemm/gemm_block.h"

namespace moiety::gemm {

// Computes the product by cuBLASLt where it keeps the contract, else by Hopper's kernels for groups
// (sm90/grouped_sm90.h), else by our tiles. `workspace` is that of GemmArgs.
void gemm_cuda(const Product& product, const TensorView& workspace, const Stream& stream);

// Computes the product by cuBLASLt. Returns false, with nothing launched, if cuBLASLt is not there
// or has no algorithm that keeps the contract: operands other than bf16, operand scales, an old
// value of another dtype than the output's or, in bf16, in the output itself, an empty reduction,
// odd addresses.
//
// The algorithm is looked up once for every shape; it depends only on the shape, the GPU and
// cuBLASLt's version. Without a workspace the stream's own is taken, which is allocated at the
// stream's first such product (also while the stream is captured) and kept until the process ends.
// Throws Error(kInvalidArgument) if the workspace is too small for the algorithm.
bool gemm_cublaslt(const Product& product, const Stream& stream, const TensorView& workspace = {});
// Bytes that the algorithm works in; 0 where gemm_cublaslt does not take the product.
int64_t cublaslt_workspace(const Product& product, const Stream& stream);
inline constexpr int64_t kCublasLtWorkspace =
    int64_t{32} << 20;  // the most that an algorithm may take: NVIDIA's recommendation for Hopper

// Whether cuBLASLt is available, or why not.
struct CublasLtStatus {
  bool available = false;
  std::string text;
};
const CublasLtStatus& cublaslt_status();

}  // namespace moiety::gemm
