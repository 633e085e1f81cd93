// Streams of GPUs, which the process keeps.
#include <algorithm>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "moiety/base/cuda_check.cuh"
#include "moiety/base/gpu_runtime.h"
#include "moiety/base/log.h"
#include "moiety/base/per_device.h"

namespace moiety::gpu {
namespace {

// A byte of the GPU that is current when it is made.
struct Byte {
  Byte() { MOIETY_CUDA_CHECK(cudaMalloc(&data, 1)); }
  void* data = nullptr;
};

// All streams that have been made, and those of them that nobody has.
class Streams {
 public:
  void* take(int device, int priority) {
    const std::lock_guard lock(mutex_);
    std::vector<void*>& free = free_[{device, priority}];
    if (free.empty()) return nullptr;
    void* const out = free.back();
    free.pop_back();
    return out;
  }
  void add(void* stream, int priority) {
    const std::lock_guard lock(mutex_);
    priority_[stream] = priority;
  }
  void give(int device, void* stream) {
    const std::lock_guard lock(mutex_);
    free_[{device, priority_.at(stream)}].push_back(stream);
  }

 private:
  std::mutex mutex_;
  std::map<void*, int> priority_;
  std::map<std::pair<int, int>, std::vector<void*>> free_;
};

Streams& streams() {
  static auto& all = *new Streams;
  return all;
}

// The highest priority is left to kernels of a warp for which other ranks wait (comm/mapped).
void* create(int device, bool high) {
  const CudaDeviceGuard guard(device);
  int lowest = 0, highest = 0;
  MOIETY_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  const int priority = high ? std::min(highest + 1, lowest) : lowest;
  if (void* const free = streams().take(device, priority)) return free;
  cudaStream_t stream = nullptr;
  MOIETY_CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority));
  touch_stream(device, stream);
  MOIETY_CUDA_CHECK(cudaStreamSynchronize(stream));
  streams().add(stream, priority);
  return stream;
}

}  // namespace

void* create_stream(int device) { return create(device, true); }
void* create_lane(int device) { return create(device, false); }

void touch_stream(int device, void* stream) {
  const CudaDeviceGuard guard(device);
  MOIETY_CUDA_CHECK(
      cudaMemsetAsync(per_device<Byte>(device).data, 0, 1, static_cast<cudaStream_t>(stream)));
}

void destroy_stream(int device, void* stream) noexcept {
  try {
    streams().give(device, stream);
  } catch (const std::exception& e) {
    log(LogLevel::kError, "{}", e.what());
  }
}

}  // namespace moiety::gpu
