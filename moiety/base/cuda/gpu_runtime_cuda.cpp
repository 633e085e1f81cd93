#include <cstring>

#include "moiety/base/cuda_check.cuh"
#include "moiety/base/gpu_runtime.h"
#include "moiety/base/log.h"

namespace moiety::gpu {
namespace {

cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t event_of(void* event) { return static_cast<cudaEvent_t>(event); }
cudaGraph_t graph_of(void* graph) { return static_cast<cudaGraph_t>(graph); }
cudaGraphExec_t executable_of(void* executable) { return static_cast<cudaGraphExec_t>(executable); }

// Runs f for a destructor: at the end of a process the run time may be gone before static objects
// are.
template <class F>
void quietly(const F& f) noexcept {
  int ignored = 0;
  if (cudaGetDevice(&ignored) == cudaErrorCudartUnloading) return;
  try {
    f();
  } catch (const std::exception& e) {
    log(LogLevel::kError, "{}", e.what());
  }
}

thread_local Activity t_activity;

}  // namespace

GpuStatus find_gpus() {
  GpuStatus status;
  status.built = true;
  cudaRuntimeGetVersion(&status.runtime);
  cudaDriverGetVersion(&status.driver);
  const cudaError_t result = cudaGetDeviceCount(&status.count);
  if (result == cudaSuccess && status.count > 0) return status;
  status.count = 0;
  if (status.driver == 0) {
    status.text = "no GPU is visible: there is no NVIDIA driver (libcuda.so.1)";
  } else {
    status.text = text("no GPU is visible: {} (the driver is for CUDA up to {}.{})",
                       result == cudaSuccess ? "none is listed" : cudaGetErrorString(result),
                       status.driver / 1000, status.driver % 1000 / 10);
  }
  cudaGetLastError();
  return status;
}

GpuProperties find_properties(int index) {
  cudaDeviceProp p{};
  MOIETY_CUDA_CHECK(cudaGetDeviceProperties(&p, index));
  return {.name = p.name,
          .major = p.major,
          .minor = p.minor,
          .multiprocessors = p.multiProcessorCount,
          .memory = int64_t(p.totalGlobalMem),
          .l2 = p.l2CacheSize,
          .shared_block = int64_t(p.sharedMemPerBlockOptin)};
}

int64_t free_memory(int device) {
  const CudaDeviceGuard guard(device);
  size_t free = 0, total = 0;
  MOIETY_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  return int64_t(free);
}

void* driver_function(const char* name) {
  constexpr unsigned kVersion = 12000;
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  if (cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &result) !=
      cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return result == cudaDriverEntryPointSuccess ? found : nullptr;
}

Activity activity() { return t_activity; }

void* allocate(int device, int64_t bytes, const char* what) {
  ++t_activity.allocations;
  const CudaDeviceGuard guard(device);
  void* data = nullptr;
  const cudaError_t result = cudaMalloc(&data, bytes);
  if (result == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    fail(ErrorKind::kOutOfMemory, "{}: cuda:{} is out of memory for {}, {} are free", what, device,
         bytes_text(bytes), bytes_text(free_memory(device)));
  }
  cuda_check(result, "cudaMalloc");
  // Memory is zeroed before any stream can touch it: other streams do not wait for the default one.
  MOIETY_CUDA_CHECK(cudaMemsetAsync(data, 0, bytes, cudaStreamPerThread));
  MOIETY_CUDA_CHECK(cudaStreamSynchronize(cudaStreamPerThread));
  return data;
}

void free(int device, void* data) noexcept {
  ++t_activity.allocations;
  quietly([&] {
    const CudaDeviceGuard guard(device);
    MOIETY_CUDA_CHECK(cudaFree(data));
  });
}

void* allocate_pinned(int64_t bytes, const char* what) {
  ++t_activity.allocations;
  void* data = nullptr;
  const cudaError_t result = cudaHostAlloc(&data, bytes, cudaHostAllocPortable);
  if (result == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    fail(ErrorKind::kOutOfMemory, "{}: no pinned memory for {}", what, bytes_text(bytes));
  }
  cuda_check(result, "cudaHostAlloc");
  std::memset(data, 0, bytes);
  return data;
}

void free_pinned(void* data) noexcept {
  ++t_activity.allocations;
  quietly([&] { MOIETY_CUDA_CHECK(cudaFreeHost(data)); });
}

void synchronize_stream(int device, void* stream) {
  ++t_activity.waits;
  const CudaDeviceGuard guard(device);
  MOIETY_CUDA_CHECK(cudaStreamSynchronize(stream_of(stream)));
}

void synchronize_device(int device) {
  ++t_activity.waits;
  const CudaDeviceGuard guard(device);
  MOIETY_CUDA_CHECK(cudaDeviceSynchronize());
}

void* create_event(int device, bool timed) {
  const CudaDeviceGuard guard(device);
  cudaEvent_t event = nullptr;
  MOIETY_CUDA_CHECK(
      cudaEventCreateWithFlags(&event, timed ? cudaEventDefault : cudaEventDisableTiming));
  return event;
}

void destroy_event(int device, void* event) noexcept {
  quietly([&] {
    const CudaDeviceGuard guard(device);
    MOIETY_CUDA_CHECK(cudaEventDestroy(event_of(event)));
  });
}

void record_event(int device, void* event, void* stream) {
  const CudaDeviceGuard guard(device);
  MOIETY_CUDA_CHECK(cudaEventRecord(event_of(event), stream_of(stream)));
}

bool event_complete(int device, void* event) {
  const CudaDeviceGuard guard(device);
  const cudaError_t result = cudaEventQuery(event_of(event));
  if (result == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  cuda_check(result, "cudaEventQuery");
  return true;
}

void synchronize_event(int device, void* event) {
  ++t_activity.waits;
  const CudaDeviceGuard guard(device);
  MOIETY_CUDA_CHECK(cudaEventSynchronize(event_of(event)));
}

void stream_wait(int device, void* stream, void* event) {
  const CudaDeviceGuard guard(device);
  MOIETY_CUDA_CHECK(cudaStreamWaitEvent(stream_of(stream), event_of(event)));
}

double elapsed_ms(void* begin, void* end) {
  float ms = 0;
  MOIETY_CUDA_CHECK(cudaEventElapsedTime(&ms, event_of(begin), event_of(end)));
  return ms;
}

// The copies of rows refuse pitches over 2 GiB; copies of bytes take any size.
void copy_rows(int device, const Rows& to, const Rows& from, void* stream) {
  const CudaDeviceGuard guard(device);
  const cudaStream_t s = stream_of(stream);
  if (to.dense() && from.dense()) {
    MOIETY_CUDA_CHECK(
        cudaMemcpyAsync(to.data, from.data, to.bytes * to.count, cudaMemcpyDefault, s));
  } else {
    MOIETY_CUDA_CHECK(cudaMemcpy2DAsync(to.data, to.pitch, from.data, from.pitch, to.bytes,
                                        to.count, cudaMemcpyDefault, s));
  }
}

void fill_rows(int device, const Rows& to, uint8_t value, void* stream) {
  const CudaDeviceGuard guard(device);
  const cudaStream_t s = stream_of(stream);
  if (to.dense()) {
    MOIETY_CUDA_CHECK(cudaMemsetAsync(to.data, value, to.bytes * to.count, s));
  } else {
    MOIETY_CUDA_CHECK(cudaMemset2DAsync(to.data, to.pitch, value, to.bytes, to.count, s));
  }
}

void begin_capture(int device, void* stream) {
  const CudaDeviceGuard guard(device);
  MOIETY_CUDA_CHECK(cudaStreamBeginCapture(stream_of(stream), cudaStreamCaptureModeThreadLocal));
}

void* end_capture(int device, void* stream, bool failing) {
  const CudaDeviceGuard guard(device);
  cudaGraph_t graph = nullptr;
  const cudaError_t result = cudaStreamEndCapture(stream_of(stream), &graph);
  if (failing) {
    cudaGetLastError();
    return graph;
  }
  cuda_check(result, "cudaStreamEndCapture");
  return graph;
}

void destroy_graph(void* graph) noexcept {
  quietly([&] { MOIETY_CUDA_CHECK(cudaGraphDestroy(graph_of(graph))); });
}

int64_t graph_nodes(void* graph) {
  size_t count = 0;
  MOIETY_CUDA_CHECK(cudaGraphGetNodes(graph_of(graph), nullptr, &count));
  return int64_t(count);
}

void* instantiate(int device, void* graph, void* stream) {
  const CudaDeviceGuard guard(device);
  cudaGraphExec_t executable = nullptr;
  MOIETY_CUDA_CHECK(cudaGraphInstantiate(&executable, graph_of(graph)));
  const cudaError_t result = cudaGraphUpload(executable, stream_of(stream));
  if (result != cudaSuccess) destroy_executable(executable);
  cuda_check(result, "cudaGraphUpload");
  return executable;
}

void destroy_executable(void* executable) noexcept {
  quietly([&] { MOIETY_CUDA_CHECK(cudaGraphExecDestroy(executable_of(executable))); });
}

bool update_executable(void* executable, void* graph) {
  cudaGraphExecUpdateResultInfo info{};
  const cudaError_t result = cudaGraphExecUpdate(executable_of(executable), graph_of(graph), &info);
  if (result == cudaErrorGraphExecUpdateFailure) {
    cudaGetLastError();
    return false;
  }
  cuda_check(result, "cudaGraphExecUpdate");
  return true;
}

void launch_executable(int device, void* executable, void* stream) {
  const CudaDeviceGuard guard(device);
  MOIETY_CUDA_CHECK(cudaGraphLaunch(executable_of(executable), stream_of(stream)));
}

}  // namespace moiety::gpu
