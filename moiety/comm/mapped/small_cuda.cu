#include "moiety/base/launch.cuh"
#include "moiety/comm/mapped/sum_device.cuh"
#include "moiety/comm/mapped/wait_device.cuh"

namespace moiety::comm::mapped {

void load_joined_kernels();  // joined_cuda.cu
void load_meet_kernels();    // meet_cuda.cu
void load_sum_kernels();     // sum_cuda.cu

namespace {

constexpr int kThreads = 512;

struct SmallOperands {
  const std::byte* send[kMaxRanks];
  std::byte* recv[kMaxRanks];
  int32_t send_bytes[kMaxRanks], recv_bytes[kMaxRanks];
  std::byte* sum;
  int32_t elements;
};
static_assert(sizeof(Region) + sizeof(Meeting) + sizeof(SmallOperands) < 4096);

template <class T>
__device__ void copy_as(std::byte* to, const std::byte* from, int bytes) {
  for (int i = threadIdx.x; i < bytes / int(sizeof(T)); i += kThreads) {
    reinterpret_cast<T*>(to)[i] = reinterpret_cast<const T*>(from)[i];
  }
}

__device__ void block_copy(std::byte* to, const std::byte* from, int bytes) {
  const auto bits = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) |
                    static_cast<uintptr_t>(bytes);
  if (bits % 16 == 0) return copy_as<uint4>(to, from, bytes);
  if (bits % 4 == 0) return copy_as<uint32_t>(to, from, bytes);
  if (bits % 2 == 0) return copy_as<uint16_t>(to, from, bytes);
  copy_as<uint8_t>(to, from, bytes);
}

// Pushes to all peers, meets them, then uses what they have pushed; nothing if one has not come: what
// then lies in its place came before. A rank's place at a peer is written again two meetings later,
// when that peer has read it.
template <class Use>
__device__ void exchange(const Region& region, const Meeting& meeting,
                         const SmallOperands& operands, Use&& use) {
  __shared__ uint64_t counts[kMaxRanks];
  Control& control = *region.control;
  const uint64_t operation = control.operation + meeting.first;
  for (int r = threadIdx.x; r < region.ranks; r += kThreads) counts[r] = control.counts[r] + 1;
  __syncthreads();
  for (int i = 1; i < region.ranks; ++i) {
    const int peer = (region.rank + i) % region.ranks;
    if (!(meeting.peers >> peer & 1)) continue;
    block_copy(memory_of(region, peer) + exchange_at(region.places, region.rank, counts[peer]),
               operands.send[peer], operands.send_bytes[peer]);
  }
  __syncthreads();
  const uint64_t begun = nanoseconds();
  const int peer = threadIdx.x;
  bool met = true;
  if (peer < region.ranks && (meeting.peers >> peer & 1)) {
    const PairCall call = call_with(meeting, peer);
    post(region, call, peer, counts[peer]);
    met = wait_for(region, call, peer, counts[peer], operation, begun);
    control.counts[peer] = counts[peer];
  }
  met = __syncthreads_and(met);
  if (threadIdx.x == 0) {
    control.operation = operation;
    control.waited_ns += nanoseconds() - begun;
  }
  if (!met) return;
  use([&](int r) -> const std::byte* {
    return memory_of(region, region.rank) + exchange_at(region.places, r, counts[r]);
  });
}

__global__ void __launch_bounds__(kThreads)
    small_copy_kernel(const __grid_constant__ Region region,
                      const __grid_constant__ Meeting meeting,
                      const __grid_constant__ SmallOperands operands) {
  exchange(region, meeting, operands, [&](auto&& pushed) {
    for (int r = 0; r < region.ranks; ++r) {
      if (meeting.peers >> r & 1) block_copy(operands.recv[r], pushed(r), operands.recv_bytes[r]);
    }
  });
}

template <class T, ReduceOp op>
__global__ void __launch_bounds__(kThreads)
    small_sum_kernel(const __grid_constant__ Region region, const __grid_constant__ Meeting meeting,
                     const __grid_constant__ SmallOperands operands) {
  exchange(region, meeting, operands, [&](auto&& pushed) {
    const auto at = [&](int r) {
      return reinterpret_cast<const T*>(r == region.rank ? operands.send[r] : pushed(r));
    };
    T* to = reinterpret_cast<T*>(operands.sum);
    const auto bits =
        reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(operands.send[region.rank]);
    const int packs = bits % 16 == 0 ? operands.elements / kWide<T> : 0;
    sum_packs<T, op, kWide<T>>(to, at, region.ranks, packs, threadIdx.x, kThreads);
    const int done = packs * kWide<T>;
    sum_packs<T, op, 1>(
        to + done, [&](int r) { return at(r) + done; }, region.ranks, operands.elements - done,
        threadIdx.x, kThreads);
  });
}

}  // namespace

void exchange_small(const Region& region, const Meeting& meeting, const SmallStep& step,
                    DType dtype, ReduceOp op, const Stream& stream) {
  SmallOperands operands{};
  for (int r = 0; r < region.ranks; ++r) {
    const SmallStep::Peer& peer = step.peers[r];
    operands.send[r] = peer.send;
    operands.recv[r] = peer.recv;
    operands.send_bytes[r] = static_cast<int32_t>(peer.send_bytes);
    operands.recv_bytes[r] = static_cast<int32_t>(peer.recv_bytes);
  }
  operands.sum = step.sum;
  operands.elements = static_cast<int32_t>(step.elements);
  const LaunchShape shape{.blocks = 1, .threads = kThreads};
  if (!step.sum) {
    return launch("comm_small", small_copy_kernel, shape, stream, region, meeting, operands);
  }
  for_reduction(dtype, op, [&]<class T, ReduceOp o>() {
    launch("comm_small_sum", small_sum_kernel<T, o>, shape, stream, region, meeting, operands);
  });
}

void load_kernels(int device) {
  const CudaDeviceGuard guard(device);
  load_meet_kernels();
  load_sum_kernels();
  load_joined_kernels();
  cudaFuncAttributes unused{};
  MOIETY_CUDA_CHECK(cudaFuncGetAttributes(&unused, small_copy_kernel));
  for_all_reductions([&]<class T, ReduceOp o>() {
    MOIETY_CUDA_CHECK(cudaFuncGetAttributes(&unused, small_sum_kernel<T, o>));
  });
}

}  // namespace moiety::comm::mapped
