// Launches of kernels that ranks meet in. They are small and others wait for them, on this GPU and on
// peers, so they have the highest priority, whatever that of their stream is.
#pragma once

#include "moiety/base/launch.cuh"

namespace moiety::comm::mapped {

template <class... Params, class... Args>
void launch_first(const char* name, void (*kernel)(Params...), int threads, const Stream& stream,
                  Args&&... args) {
  const TraceSpan span(TraceLane::kHost, name);
  const CudaDeviceGuard guard(stream.device().index);
  int lowest = 0, highest = 0;
  MOIETY_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  cudaLaunchAttribute priority{};
  priority.id = cudaLaunchAttributePriority;
  priority.val.priority = highest;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = static_cast<cudaStream_t>(stream.cuda_stream());
  config.attrs = &priority;
  config.numAttrs = 1;
  const cudaError_t result = cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
  if (result == cudaSuccess) return;
  cudaGetLastError();
  fail(ErrorKind::kCuda, "{}: launch: {} ({})", name, cudaGetErrorString(result),
       cudaGetErrorName(result));
}

}  // namespace moiety::comm::mapped
