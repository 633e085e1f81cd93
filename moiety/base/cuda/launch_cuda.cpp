#include <limits>
#include <map>
#include <mutex>

#include "moiety/base/launch.cuh"
#include "moiety/base/per_device.h"
#include "moiety/base/trace.h"

namespace moiety::detail {

void allow_shared(const void* kernel, int device, int64_t bytes) {
  if (bytes <= 24 * 1024) return;
  static std::mutex mutex;
  // Never destroyed, since the CUDA run time may end before it.
  static auto& allowed = *new std::map<std::pair<const void*, int>, int64_t>;
  // What is allowed never becomes less: a launch of another thread may need it.
  const std::lock_guard lock(mutex);
  int64_t& most = allowed[{kernel, device}];
  if (bytes <= most) return;
  MOIETY_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         static_cast<int>(bytes)));
  most = bytes;
}

int64_t resident_blocks(const void* kernel, int threads, int64_t shared_bytes, int device) {
  return per_device<KernelNumbers>(device).of(kernel, threads, shared_bytes, [&] {
    const CudaDeviceGuard guard(device);
    allow_shared(kernel, device, shared_bytes);
    int blocks = 0;
    MOIETY_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
        &blocks, kernel, threads, static_cast<size_t>(shared_bytes)));
    return int64_t{blocks} * gpu_properties(device).multiprocessors;
  });
}

void launch(const char* name, const void* kernel, const LaunchShape& shape, const Stream& stream,
            void** arguments) {
  if (shape.blocks == 0) return;
  const TraceSpan span(TraceLane::kHost, name);
  MOIETY_CHECK(shape.blocks > 0 && shape.blocks <= std::numeric_limits<int32_t>::max(),
               "{}: {} blocks", name, shape.blocks);
  const int device = stream.device().index;
  const CudaDeviceGuard guard(device);
  allow_shared(kernel, device, shape.shared_bytes);
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
  const cudaError_t result = cudaLaunchKernelExC(&config, kernel, arguments);
  if (result == cudaSuccess) [[likely]]
    return;
  cudaGetLastError();
  fail(ErrorKind::kCuda, "{}: launch of {} blocks of {} threads with {} bytes shared: {} ({})",
       name, shape.blocks, shape.threads, shape.shared_bytes, cudaGetErrorString(result),
       cudaGetErrorName(result));
}

}  // namespace moiety::detail
