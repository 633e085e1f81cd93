// Launches of kernels: sizes in 64 bits, the stream's device made current, errors that name the
// kernel.
#pragma once

#include <cstdint>
#include <cuda_runtime.h>
#include <limits>
#include <utility>

#include "moiety/base/cuda_check.cuh"
#include "moiety/base/gpu.h"
#include "moiety/base/stream.h"
#include "moiety/base/trace.h"

namespace moiety {

// The shape of a launch. Kernels have one grid dimension, the only one that may exceed 65535, and
// find their tile from it.
struct LaunchShape {
  int64_t blocks = 0;  // 0 launches nothing
  int threads = 256;
  int64_t shared_bytes = 0;  // dynamic shared memory
  // The kernel may begin while the kernel before it on the stream still runs, if that one allows
  // it. Then memory that the other writes must not be touched before
  // cudaGridDependencySynchronize(), which some block must call.
  bool early = false;
};

constexpr int64_t blocks_for(int64_t items, int64_t items_a_block) {
  return (items + items_a_block - 1) / items_a_block;
}

namespace detail {
template <class Kernel>
void allow_shared(Kernel* kernel, int64_t bytes) {
  // More than 48 KiB, with what the kernel declares itself, must be asked for; asking again costs
  // less than remembering.
  if (bytes > 24 * 1024) {
    MOIETY_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(bytes)));
  }
}
}  // namespace detail

// Launches a kernel. `name` stands in profiles, where the launch is a span of the host, and in
// errors: "quantize_rows: launch of 3 blocks of 2048 threads: ...".
template <class... Params, class... Args>
void launch(const char* name, void (*kernel)(Params...), const LaunchShape& shape,
            const Stream& stream, Args&&... args) {
  if (shape.blocks == 0) return;
  const TraceSpan span(TraceLane::kHost, name);
  MOIETY_CHECK(shape.blocks > 0 && shape.blocks <= std::numeric_limits<int32_t>::max(),
               "{}: {} blocks", name, shape.blocks);
  const CudaDeviceGuard guard(stream.device().index);
  detail::allow_shared(kernel, shape.shared_bytes);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream.cuda_stream());
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early;
  config.numAttrs = shape.early ? 1 : 0;
  const cudaError_t result = cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
  if (result == cudaSuccess) [[likely]]
    return;
  cudaGetLastError();
  fail(ErrorKind::kCuda, "{}: launch of {} blocks of {} threads with {} bytes shared: {} ({})",
       name, shape.blocks, shape.threads, shape.shared_bytes, cudaGetErrorString(result),
       cudaGetErrorName(result));
}

// Number of the kernel's blocks that run on the stream's GPU at a time: the grid of a persistent
// kernel.
template <class... Params>
int64_t resident_blocks(void (*kernel)(Params...), int threads, int64_t shared_bytes,
                        const Stream& stream) {
  const CudaDeviceGuard guard(stream.device().index);
  detail::allow_shared(kernel, shared_bytes);
  int blocks = 0;
  MOIETY_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
      &blocks, kernel, threads, static_cast<size_t>(shared_bytes)));
  return int64_t{blocks} * gpu_properties(stream.device().index).multiprocessors;
}

}  // namespace moiety
