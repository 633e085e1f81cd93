#include <span>

#include "moiety/base/launch.cuh"
#include "moiety/base/trace.h"
#include "moiety/comm/mapped/gpu_memory.h"
#include "moiety/comm/mapped/wait_device.cuh"

namespace moiety::comm::mapped {
namespace {

constexpr int kWarp = 32;

constexpr int kPeersOfLane = kMaxRanks / kWarp;

// Lane l meets peers l and l + 32. All words are stored before the first wait.
__global__ void __launch_bounds__(kWarp)
    meet_kernel(const __grid_constant__ Region region, const __grid_constant__ Meeting meeting) {
  Control& control = *region.control;
  const uint64_t operation = control.operation + meeting.first;
  const uint64_t begun = nanoseconds();
  uint64_t counts[kPeersOfLane];
  const auto each = [&](auto&& act) {
#pragma unroll
    for (int i = 0; i < kPeersOfLane; ++i) {
      const int peer = threadIdx.x + i * kWarp;
      if (peer < region.ranks && (meeting.peers >> peer & 1)) act(peer, counts[i]);
    }
  };
  each([&](int peer, uint64_t& count) { count = control.counts[peer] + 1; });
  each([&](int peer, uint64_t& count) { post(region, call_with(meeting, peer), peer, count); });
  each([&](int peer, uint64_t& count) {
    wait_for(region, call_with(meeting, peer), peer, count, operation, begun);
    control.counts[peer] = count;
  });
  __syncwarp();
  if (threadIdx.x != 0) return;
  control.operation = operation;
  control.waited_ns += nanoseconds() - begun;
}

// Peers wait for a meeting, so it takes the first place that is free, before blocks of kernels that
// were launched earlier and fill the GPU.
int highest_priority() {
  static const int priority = [] {
    int lowest = 0, highest = 0;
    MOIETY_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    return highest;
  }();
  return priority;
}

__global__ void store_kernel(uint64_t* word, uint64_t value) { store_release(word, value); }

}  // namespace

void meet(const Region& region, const Meeting& meeting, const Stream& stream) {
  const CudaDeviceGuard guard(stream.device().index);
  const TraceSpan span(TraceLane::kHost, "comm_meet");
  cudaLaunchAttribute first{};
  first.id = cudaLaunchAttributePriority;
  first.val.priority = highest_priority();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(kWarp);
  config.stream = static_cast<cudaStream_t>(stream.cuda_stream());
  config.attrs = &first;
  config.numAttrs = 1;
  MOIETY_CUDA_CHECK(cudaLaunchKernelEx(&config, meet_kernel, region, meeting));
}

void store_words(int device, std::span<uint64_t* const> words, uint64_t value) {
  const Stream stream = Stream::external({DeviceType::kCuda, device}, cudaStreamPerThread);
  for (uint64_t* word : words) {
    launch("comm_store_word", store_kernel, {.blocks = 1, .threads = 1}, stream, word, value);
  }
  stream.synchronize();
}

void load_meet_kernels() {
  cudaFuncAttributes unused{};
  MOIETY_CUDA_CHECK(cudaFuncGetAttributes(&unused, meet_kernel));
}

}  // namespace moiety::comm::mapped
