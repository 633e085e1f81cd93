#include <cuda.h>

#include "moiety/base/cuda_check.cuh"
#include "moiety/base/gpu_runtime.h"

namespace moiety::gpu {
namespace {

// Whether this process has the run time's context on the GPU.
bool has_context(int device) {
  unsigned flags = 0;
  int active = 1;
  if (void* const found = driver_function("cuDevicePrimaryCtxGetState")) {
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
