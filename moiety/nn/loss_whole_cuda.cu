// Cross-entropy on GPUs of rows that are read once. A thread block has a row in shared memory, and
// what does not fit there in registers.
//
// A block has sixteen warps that work and one that conducts. The conductor brings the next row by
// bulk copies into what the last one has left. Workers take groups of logits in turns: for the
// maximum; for the exponentials, which replace the logits; for the gradient. Behind the exponentials
// the conductor adds them up in the order of lane_sum. Exponentials that workers keep in registers
// pass it through a slot.
#include <algorithm>

#include "moiety/base/math.h"
#include "moiety/nn/barrier.cuh"
#include "moiety/nn/element.h"
#include "moiety/nn/loss_device.cuh"

namespace moiety::nn {
namespace {

using device::Barrier, device::LossTarget;
constexpr int kGroup = device::kLossGroup, kEach = device::kLossEach;
constexpr uint32_t kWarp = 0xFFFFFFFFu;

constexpr int kWorkers = 16, kThreads = 32 * (kWorkers + 1);
constexpr int kSegment = kWorkers * kGroup;  // logits that have a barrier: a group of each worker
constexpr int kHeld = 13, kLate = 6;         // segments in shared memory, and in registers
constexpr int kSegments = kHeld + kLate;     // of a row at most

// Uses of these barriers are rows that have a target.
struct State {
  Barrier full[kHeld], empty[kHeld];  // of logits
  Barrier done[kSegments];            // exponentials
  Barrier freed[kSegments];           // the slot of late segments, by the conductor
  Barrier max_known, factor_known;
  float maxima[2][kWorkers];  // of even and odd uses
  float factor;
};
constexpr int64_t kSlots = int64_t{4} * kSegment * (kHeld + 1);  // bytes
constexpr int64_t kShared = kSlots + sizeof(State);

template <class T>
struct Block {
  const LossParams& p;
  float* slots;  // [kHeld + 1, kWorkers, kGroup]
  State& state;
  int lane = threadIdx.x % 32, worker = threadIdx.x / 32 - 1;
  int logits = int(p.vocabulary);  // groups past them are -inf
  int segments = (logits + kSegment - 1) / kSegment, held = min(segments, kHeld);

  __device__ float* slot(int segment) const { return slots + kSegment * min(segment, kHeld); }
  // The worker's group of a segment.
  __device__ int begin(int segment) const { return segment * kSegment + worker * kGroup; }
  __device__ float* group(int segment) const { return slot(segment) + worker * kGroup; }
  __device__ void take(const float* from, int segment, float (&v)[kEach]) const {
    const int valid = logits - begin(segment);
    if (valid >= kGroup) return device::take_logits<true, true>(from, kGroup, v);
    device::take_logits<true, false>(from, valid, v);
  }
  __device__ void init() const {
    for (Barrier& b : state.full) b.init(1);
    for (Barrier& b : state.empty) b.init(kWorkers);
    for (Barrier& b : state.done) b.init(kWorkers);
    for (Barrier& b : state.freed) b.init(1);
    state.max_known.init(kWorkers);
    state.factor_known.init(1);
    device::fence_init();
  }
  // work(row, target, use) for each row that has a target, constant(row, target) for the others.
  template <class Work, class Constant>
  __device__ void rows(const Work& work, const Constant& constant) const {
    const int step = gridDim.x, all = int(p.rows);
    LossTarget next = device::loss_target(p, blockIdx.x);
    for (int row = blockIdx.x, use = 0; row < all; row += step) {
      const LossTarget target = next;
      if (row + step < all) next = device::loss_target(p, row + step);
      target.valid ? work(row, target.word, use++) : constant(row, target.constant());
    }
  }
  __device__ const float* logits_of(int64_t row) const { return p.logits + row * p.logits_stride; }

  // ---- the conductor

  __device__ void bring(const float* z, int use) const {
    for (int s = 0; s < held; ++s) {
      if (use > 0) state.empty[s].wait(use - 1);
      const auto bytes = uint32_t(4 * min(kSegment, logits - s * kSegment));
      state.full[s].arrive_expecting(bytes);
      device::bulk_copy(slot(s), z + s * kSegment, bytes, state.full[s]);
    }
  }
  // A quarter of a segment in the order of lane_sum, of which a lane has two vectors a group.
  static constexpr int kQuarter = kWorkers / 4, kFours = kGroup / 4;
  using Quarter = float4[kQuarter][2];
  __device__ void load(int segment, int quarter, Quarter& e) const {
    const auto* from = reinterpret_cast<const float4*>(slot(segment)) + 2 * lane;
#pragma unroll
    for (int i = 0; i < kQuarter; ++i) {
      e[i][0] = from[(quarter * kQuarter + i) * kFours];
      e[i][1] = from[(quarter * kQuarter + i) * kFours + 1];
    }
    __syncwarp();  // keeps the compiler from moving loads to where their values are needed
  }
  __device__ static float add(const Quarter& e, float sum) {
#pragma unroll
    for (const auto& group : e) {
#pragma unroll
      for (const float4& four : group) sum = sum + four.x + four.y + four.z + four.w;
    }
    return sum;
  }
  // The lanes' sums of exponentials. An addition waits for the one before, so that
  // all else has to come between them: loads are a quarter of a segment ahead.
  __device__ float add_all(int use) const {
    float sum = 0;
    Quarter even, odd;
    state.done[0].wait(use);
    load(0, 0, even);
    for (int s = 0; s < segments; ++s) {
      load(s, 1, odd);
      sum = add(even, sum);
      load(s, 2, even);
      sum = add(odd, sum);
      load(s, 3, odd);
      if (s >= kHeld && lane == 0) state.freed[s].arrive();
      sum = add(even, sum);
      if (s + 1 < segments) {
        state.done[s + 1].wait(use);
        load(s + 1, 0, even);
      }
      sum = add(odd, sum);
    }
    return sum;
  }
  __device__ void conduct() const {
    rows(
        [&](int row, int target, int use) {
          const float at_target = p.logits[row * p.logits_stride + target];
          if (lane == 0) bring(logits_of(row), use);
          __syncwarp();
          float sum = add_all(use);
#pragma unroll
          for (int o = 16; o >= 1; o /= 2) sum += __shfl_xor_sync(kWarp, sum, o);
          conclude(row, at_target, row_max(use), sum);
        },
        [&](int row, float value) {
          if (lane == 0) p.loss[row] = value;
        });
  }
  // Lane 0 gives workers the factor, and stores the loss.
  __device__ void conclude(int64_t row, float at_target, float max, float sum) const {
    if (lane > 0) return;
    // The logarithm takes long; without z_coef the gradient need not wait for it.
    const auto lse = [&] { return max + log(sum); };
    const float factor = (p.z_coef != 0 ? 1 + 2 * p.z_coef * lse() : 1) * (1 / sum);
    state.factor = factor;
    state.factor_known.arrive();
    p.loss[row] = lse() - at_target;
  }

  // ---- workers

  __device__ float row_max(int use) const {
    state.max_known.wait(use);
    float max = state.maxima[use % 2][lane % kWorkers];
#pragma unroll
    for (int o = kWorkers / 2; o >= 1; o /= 2) {
      max = fmaxf(max, __shfl_xor_sync(kWarp, max, o));
    }
    return max;
  }
  // The largest of a worker's logits; fmaxf passes over NaN. Those that stay in registers are
  // loaded while bulk copies bring the others.
  __device__ float own_max(const float* z, int use, float (&late)[kLate][kEach]) const {
#pragma unroll
    for (int k = 0; k < kLate; ++k) {
      if (kHeld + k < segments) take(z + begin(kHeld + k), kHeld + k, late[k]);
    }
    float max = -INFINITY;
    for (int s = 0; s < held; ++s) {
      state.full[s].wait(use);
      float v[kEach];
      take(group(s), s, v);
#pragma unroll
      for (const float x : v) max = fmaxf(max, x);
    }
#pragma unroll
    for (int k = 0; k < kLate; ++k) {
      if (kHeld + k >= segments) break;
#pragma unroll
      for (const float x : late[k]) max = fmaxf(max, x);
    }
#pragma unroll
    for (int o = 16; o >= 1; o /= 2) max = fmaxf(max, __shfl_xor_sync(kWarp, max, o));
    return max;
  }
  __device__ void put(int segment, const float (&e)[kEach]) const {
    device::put_logits<true>(group(segment), e);
    __syncwarp();
    if (lane == 0) state.done[segment].arrive();
  }
  __device__ void exponentials(float max, int use, float (&late)[kLate][kEach]) const {
    for (int s = 0; s < held; ++s) {
      float v[kEach];
      take(group(s), s, v);
#pragma unroll
      for (float& x : v) x = exp_nonpositive(x - max);
      put(s, v);
    }
#pragma unroll
    for (int k = 0; k < kLate; ++k) {
      if (kHeld + k >= segments) break;
#pragma unroll
      for (float& x : late[k]) x = exp_nonpositive(x - max);
      if (k > 0) state.freed[kHeld + k - 1].wait(use);
      put(kHeld + k, late[k]);
    }
  }
  // The gradient may lie in the memory of the row, of which all has been read by now.
  __device__ void gradient(T* dz, int target, float factor, float (&late)[kLate][kEach]) const {
    const auto store = [&](int segment, float(&e)[kEach]) {
      const int at = begin(segment);
      device::store_dlogits<true>(dz + at, logits - at, target - at, factor, e);
    };
    for (int s = 0; s < held; ++s) {
      float v[kEach];
      device::take_logits<true, true>(group(s), kGroup, v);
      device::fence_for_bulk();
      __syncwarp();
      if (lane == 0) state.empty[s].arrive();
      store(s, v);
    }
#pragma unroll
    for (int k = 0; k < kLate; ++k) {
      if (kHeld + k >= segments) break;
      store(kHeld + k, late[k]);
    }
  }
  __device__ T* dlogits_of(int64_t row) const {
    return static_cast<T*>(p.dlogits) + row * p.dlogits_stride;
  }
  __device__ void work() const {
    rows(
        [&](int row, int target, int use) {
          float late[kLate][kEach];
          const float own = own_max(logits_of(row), use, late);
          if (lane == 0) {
            state.maxima[use % 2][worker] = own;
            state.max_known.arrive();
          }
          __syncwarp();
          exponentials(row_max(use), use, late);
          state.factor_known.wait(use);
          gradient(dlogits_of(row), target, state.factor, late);
        },
        [&](int row, float value) {
          T* dz = dlogits_of(row);
          for (int i = threadIdx.x - 32; i < logits; i += kThreads - 32) dz[i] = T(value);
        });
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads, 1) loss_whole(const __grid_constant__ LossParams p) {
  extern __shared__ float4 memory[];
  auto* slots = reinterpret_cast<float*>(memory);
  const Block<T> block{p, slots, *reinterpret_cast<State*>(slots + kSlots / 4)};
  if (threadIdx.x == 0) block.init();
  __syncthreads();
  threadIdx.x < 32 ? block.conduct() : block.work();
}

}  // namespace

bool loss_whole_takes(int64_t vocabulary) { return vocabulary <= kSegments * kSegment; }

void loss_whole_cuda(const LossParams& p, DType dlogits, const Stream& stream) {
  const int64_t multiprocessors = gpu_properties(stream.device().index).multiprocessors;
  const LaunchShape shape{std::min(p.rows, multiprocessors), kThreads, kShared};
  with_storage(dlogits, [&](auto element) {
    launch("cross_entropy", loss_whole<decltype(element)>, shape, stream, p);
  });
}

}  // namespace moiety::nn
