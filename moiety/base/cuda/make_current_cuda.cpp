#include <cuda.h>

#include "moiety/base/cuda_check.cuh"
#include "moiety/base/gpu_runtime.h"

namespace moiety::gpu {
namespace {

// Whether this process has the run time's context on the GPU.
bool has_context(int device) {
  constexpr unsigned kVersion = 12000;  // the function as CUDA 12 has it
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  MOIETY_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &found, kVersion,
                                                     cudaEnableDefault, &result));
  unsigned flags = 0;
  int active = 1;
  if (result == cudaDriverEntryPointSuccess) {
    reinterpret_cast<decltype(&cuDevicePrimaryCtxGetState)>(found)(device, &flags, &active);
  }
  return active != 0;
}

}  // namespace

void make_current(int device) {
  int now = 0;
  MOIETY_CUDA_CHECK(cudaGetDevice(&now));
  if (now != device && !has_context(now)) MOIETY_CUDA_CHECK(cudaSetDevice(device));
}

}  // namespace moiety::gpu
