#include "moiety/base/launch.cuh"
#include "moiety/comm/mapped/wait_device.cuh"
#include "moiety/comm/nccl/marks.h"

namespace moiety::comm::nccl {
namespace {

using mapped::call_with;
using mapped::count_of;
using mapped::load_relaxed;
using mapped::make_word;
using mapped::signature;
using mapped::store_release;

constexpr int kWarp = 32;

__global__ void __launch_bounds__(kWarp)
    open_kernel(const __grid_constant__ Desk desk,
                const __grid_constant__ mapped::Meeting meeting) {
  const uint64_t count = *desk.count + 1;
  __syncwarp();
  for (int peer = threadIdx.x; peer < desk.ranks; peer += kWarp) {
    Post post{.word = 0, .call = call_with(meeting, peer)};
    post.word = make_word(count, signature(post.call));
    desk.outbox[peer] = post;
    desk.page->mine[peer] = post;
  }
  __threadfence_system();
  __syncwarp();
  if (threadIdx.x == 0) {
    *desk.count = count;
    store_release(&desk.page->started, count);
  }
}

__global__ void __launch_bounds__(kWarp) compare_kernel(const __grid_constant__ Desk desk) {
  for (int peer = threadIdx.x; peer < desk.ranks; peer += kWarp) {
    if (peer == desk.rank) continue;
    const bool fits = load_relaxed(&desk.page->theirs[peer].word) == desk.outbox[peer].word;
    if (!fits) store_release(&desk.page->found, uint64_t(peer) + 1);
  }
}

__global__ void close_kernel(const __grid_constant__ Desk desk) {
  store_release(&desk.page->closed, *desk.count);
}

}  // namespace

void open_on_gpu(const Desk& desk, const mapped::Meeting& meeting, const Stream& stream) {
  launch("nccl_open", open_kernel, {.blocks = 1, .threads = kWarp}, stream, desk, meeting);
}

void compare_on_gpu(const Desk& desk, const Stream& stream) {
  launch("nccl_compare", compare_kernel, {.blocks = 1, .threads = kWarp}, stream, desk);
}

void close_on_gpu(const Desk& desk, const Stream& stream) {
  launch("nccl_close", close_kernel, {.blocks = 1, .threads = 1}, stream, desk);
}

void load_mark_kernels() {
  cudaFuncAttributes unused{};
  MOIETY_CUDA_CHECK(cudaFuncGetAttributes(&unused, open_kernel));
  MOIETY_CUDA_CHECK(cudaFuncGetAttributes(&unused, compare_kernel));
  MOIETY_CUDA_CHECK(cudaFuncGetAttributes(&unused, close_kernel));
}

bool in_capture(const Stream& stream) {
  cudaStreamCaptureStatus status{};
  MOIETY_CUDA_CHECK(
      cudaStreamIsCapturing(static_cast<cudaStream_t>(stream.cuda_stream()), &status));
  return status == cudaStreamCaptureStatusActive;
}

}  // namespace moiety::comm::nccl
