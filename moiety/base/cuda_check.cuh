// Checked calls of the CUDA run time, and a guard for the current device.
#pragma once

#include <cuda_runtime_api.h>

#include "moiety/base/error.h"

namespace moiety {

// Throws Error(kCuda) that names the call and the error. A lost GPU stays lost; any other error is
// cleared, so that the next call does not report it again.
inline void cuda_check(cudaError_t result, const char* call) {
  if (result == cudaSuccess) [[likely]]
    return;
  cudaGetLastError();
  fail(ErrorKind::kCuda, "{}: {} ({})", call, cudaGetErrorString(result), cudaGetErrorName(result));
}

// Makes `device` current for its lifetime.
class CudaDeviceGuard {
 public:
  explicit CudaDeviceGuard(int device) {
    cuda_check(cudaGetDevice(&before_), "cudaGetDevice");
    if (device == before_) {
      before_ = -1;
    } else {
      cuda_check(cudaSetDevice(device), "cudaSetDevice");
    }
  }
  ~CudaDeviceGuard() {
    if (before_ >= 0) cudaSetDevice(before_);
  }
  CudaDeviceGuard(const CudaDeviceGuard&) = delete;
  CudaDeviceGuard& operator=(const CudaDeviceGuard&) = delete;

 private:
  int before_ = -1;
};

}  // namespace moiety

// Checks a call of the CUDA run time; the text of the error is the call as written.
#define MOIETY_CUDA_CHECK(call) ::moiety::cuda_check(call, #call)
