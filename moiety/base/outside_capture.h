// Work that is not part of the graph that a thread captures, for sources that call the CUDA run
// time.
#pragma once

#include "moiety/base/cuda_check.cuh"

namespace moiety {

// During its lifetime this thread may allocate and load kernels, even in the midst of a capture.
class OutsideCapture {
 public:
  OutsideCapture() { MOIETY_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  ~OutsideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  OutsideCapture(const OutsideCapture&) = delete;
  OutsideCapture& operator=(const OutsideCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace moiety
