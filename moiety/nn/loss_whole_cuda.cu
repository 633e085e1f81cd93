// Cross-entropy on GPUs of rows that are read once. One thread block has a row, or the two of a
// cluster a half each, in shared memory, and what does not fit there in registers.
//
// A block has sixteen warps that work and one that conducts. The conductor brings the next row by
// bulk copies into what the last one has left. Workers take groups of logits in turns: for the
// maximum; for the exponentials, which replace the logits; for the gradient. Behind the exponentials
// the conductor adds them up in the order of lane_sum, and the second block's goes on where the
// first one's stops. Exponentials that workers keep in registers pass the conductor through slots.
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
constexpr int kSegment = 8;       // groups that have a barrier
constexpr int kHeldSegments = 26, kHeldGroups = kHeldSegments * kSegment;
constexpr int kLate = 6;          // groups in a worker's registers
constexpr int kGroups = kHeldGroups + kLate * kWorkers;  // of a block at most
constexpr int kLateSegments = kLate * kWorkers / kSegment;
constexpr int kSlotSegments = kWorkers / kSegment;
constexpr int kMostBlocks = 2;    // of a row

// Uses of these barriers are rows that have a target.
struct State {
  Barrier full[kHeldSegments], empty[kHeldSegments];
  Barrier done[kHeldSegments + kLateSegments];  // exponentials
  Barrier freed[kLateSegments];                 // the slots, by the conductor
  Barrier max_known, sum_handed, factor_known;
  float maxima[2][kMostBlocks][kWorkers];       // of even and odd uses
  float sums[32];
  float factor;
};
constexpr int64_t kSlots = int64_t{4} * kGroup * (kHeldGroups + kWorkers);  // bytes
constexpr int64_t kShared = kSlots + sizeof(State);

// What a thread block has of the rows.
template <class T, int kBlocks>
struct Block {
  const LossParams& p;
  float* slots;  // [kHeldGroups + kWorkers, kGroup]
  State& state;
  int rank = kBlocks == 1 ? 0 : device::block_of_cluster();
  int lane = threadIdx.x % 32;
  int64_t row_groups = (p.vocabulary + kGroup - 1) / kGroup;
  int64_t first_group = (row_groups + kBlocks - 1) / kBlocks * rank;
  int groups = int(min((row_groups + kBlocks - 1) / kBlocks, row_groups - first_group));
  int held = min(groups, kHeldGroups);
  int64_t first = first_group * kGroup;  // logit
  int logits = int(min(int64_t{groups} * kGroup, p.vocabulary - first));

  __device__ float* slot(int group) const {
    return slots + kGroup * (group < kHeldGroups
                                 ? group
                                 : kHeldGroups + (group - kHeldGroups) % kWorkers);
  }
  __device__ int valid(int group) const { return logits - group * kGroup; }
  __device__ void take(const float* from, int group, float (&v)[kEach]) const {
    if (valid(group) >= kGroup) return device::take_logits<true, true>(from, kGroup, v);
    device::take_logits<true, false>(from, valid(group), v);
  }
  __device__ int groups_of(int segment) const { return min(kSegment, groups - segment * kSegment); }
  __device__ void init() const {
    for (int s = 0; s * kSegment < groups; ++s) {
      state.done[s].init(groups_of(s));
      if (s < kHeldSegments) {
        state.full[s].init(1);
        state.empty[s].init(groups_of(s));
      } else {
        state.freed[s - kHeldSegments].init(1);
      }
    }
    state.max_known.init(kBlocks * kWorkers);
    state.sum_handed.init(32);
    state.factor_known.init(1);
    device::fence_init();
  }
  // work(row, target, use) for each row that has a target, constant(row, target) for the others.
  template <class Work, class Constant>
  __device__ void rows(const Work& work, const Constant& constant) const {
    const int64_t begin = blockIdx.x / kBlocks, step = gridDim.x / kBlocks;
    LossTarget next = device::loss_target(p, begin);
    for (int64_t row = begin, use = 0; row < p.rows; row += step) {
      const LossTarget target = next;
      if (row + step < p.rows) next = device::loss_target(p, row + step);
      target.valid ? work(row, target.word, int(use++)) : constant(row, target.constant());
    }
  }
  __device__ const float* logits_of(int64_t row) const {
    return p.logits + row * p.logits_stride + first;
  }

  // ---- the conductor

  __device__ void bring(const float* z, int use) const {
    for (int s = 0; s * kSegment < held; ++s) {
      if (use > 0) state.empty[s].wait(use - 1);
      const int begin = s * kSegment * kGroup;
      const auto bytes = uint32_t(4 * min(kSegment * kGroup, logits - begin));
      state.full[s].arrive_expecting(bytes);
      device::bulk_copy(slots + begin, z + begin, bytes, state.full[s]);
    }
  }
  // Adds this block's exponentials to the lanes' sums. Loads run ahead of the additions, which wait
  // for each other.
  __device__ float add(float sum, int use) const {
    constexpr int kAhead = 4;
    float4 ahead[kAhead][2];
    const auto load = [&](int group, float4(&to)[2]) {
      if (group % kSegment == 0) state.done[group / kSegment].wait(use);
      const auto* e = reinterpret_cast<const float4*>(slot(group)) + 2 * lane;
      to[0] = e[0];
      to[1] = e[1];
      if (group >= kHeldGroups && (group % kSegment == kSegment - 1 || group == groups - 1)) {
        __syncwarp();
        if (lane == 0) state.freed[group / kSegment - kHeldSegments].arrive();
      }
    };
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (k < groups) load(k, ahead[k]);
    }
    for (int base = 0; base < groups; base += kAhead) {
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (base + k >= groups) break;
#pragma unroll
        for (const float4& e : ahead[k]) sum = sum + e.x + e.y + e.z + e.w;
        if (base + k + kAhead < groups) load(base + k + kAhead, ahead[k]);
      }
    }
    return sum;
  }
  __device__ void conduct() const {
    rows(
        [&](int64_t row, int64_t target, int use) {
          const float at_target = p.logits[row * p.logits_stride + target];
          if (lane == 0) bring(logits_of(row), use);
          __syncwarp();
          float sum = 0;
          if (rank > 0) {
            state.sum_handed.wait_for_cluster(use);
            sum = state.sums[lane];
          }
          sum = add(sum, use);
          if (rank + 1 < kBlocks) {
            device::store_at(&state.sums[lane], rank + 1, sum);
            state.sum_handed.arrive_at(rank + 1);
            return;
          }
#pragma unroll
          for (int o = 16; o >= 1; o /= 2) sum += __shfl_xor_sync(kWarp, sum, o);
          conclude(row, at_target, row_max(use), sum);
        },
        [&](int64_t row, float value) {
          if (rank == 0 && lane == 0) p.loss[row] = value;
        });
  }
  // Lane 0 gives all blocks of the row its factor, and stores the loss.
  __device__ void conclude(int64_t row, float at_target, float max, float sum) const {
    if (lane > 0) return;
    // The logarithm takes long; without z_coef the gradient need not wait for it.
    const auto lse = [&] { return max + log(sum); };
    const float factor = (p.z_coef != 0 ? 1 + 2 * p.z_coef * lse() : 1) * (1 / sum);
    for (int b = 0; b < kBlocks; ++b) {
      device::store_at(&state.factor, b, factor);
      state.factor_known.arrive_at(b);
    }
    p.loss[row] = lse() - at_target;
  }

  // ---- workers

  __device__ float row_max(int use) const {
    state.max_known.wait_for_cluster(use);
    const float(&maxima)[kMostBlocks][kWorkers] = state.maxima[use % 2];
    float max = lane < kBlocks * kWorkers ? (&maxima[0][0])[lane] : -INFINITY;
#pragma unroll
    for (int o = 16; o >= 1; o /= 2) max = fmaxf(max, __shfl_xor_sync(kWarp, max, o));
    return max;
  }
  // The largest of a worker's logits; fmaxf passes over NaN. Those that stay in registers are
  // loaded while bulk copies bring the others.
  __device__ float own_max(const float* z, int use, int worker, float (&late)[kLate][kEach]) const {
#pragma unroll
    for (int k = 0; k < kLate; ++k) {
      const int group = kHeldGroups + k * kWorkers + worker;
      if (group < groups) take(z + group * kGroup, group, late[k]);
    }
    float max = -INFINITY;
    for (int group = worker; group < held; group += kWorkers) {
      state.full[group / kSegment].wait(use);
      float v[kEach];
      take(slot(group), group, v);
#pragma unroll
      for (const float x : v) max = fmaxf(max, x);
    }
#pragma unroll
    for (int k = 0; k < kLate; ++k) {
      if (kHeldGroups + k * kWorkers + worker >= groups) break;
#pragma unroll
      for (const float x : late[k]) max = fmaxf(max, x);
    }
#pragma unroll
    for (int o = 16; o >= 1; o /= 2) max = fmaxf(max, __shfl_xor_sync(kWarp, max, o));
    return max;
  }
  __device__ void report_done(int group) const {
    __syncwarp();
    if (lane == 0) state.done[group / kSegment].arrive();
  }
  __device__ void exponentials(float max, int use, int worker, float (&late)[kLate][kEach]) const {
    for (int group = worker; group < held; group += kWorkers) {
      float v[kEach];
      take(slot(group), group, v);
#pragma unroll
      for (float& x : v) x = exp_nonpositive(x - max);
      device::put_logits<true>(slot(group), v);
      report_done(group);
    }
#pragma unroll
    for (int k = 0; k < kLate; ++k) {
      const int group = kHeldGroups + k * kWorkers + worker;
      if (group >= groups) break;
#pragma unroll
      for (float& x : late[k]) x = exp_nonpositive(x - max);
      if (k > 0) state.freed[group / kSegment - kHeldSegments - kSlotSegments].wait(use);
      device::put_logits<true>(slot(group), late[k]);
      report_done(group);
    }
  }
  // The gradient may lie in the memory of the row, of which all has been read by now.
  __device__ void gradient(T* dz, int64_t target, float factor, int worker,
                           float (&late)[kLate][kEach]) const {
    for (int group = worker; group < held; group += kWorkers) {
      const int at = group * kGroup;
      if (dz) {
        float v[kEach];
        device::take_logits<true, true>(slot(group), kGroup, v);
        device::store_dlogits<true>(dz + at, valid(group), target - at, factor, v);
      }
      device::fence_for_bulk();
      __syncwarp();
      if (lane == 0) state.empty[group / kSegment].arrive();
    }
#pragma unroll
    for (int k = 0; k < kLate; ++k) {
      const int group = kHeldGroups + k * kWorkers + worker, at = group * kGroup;
      if (group >= groups || !dz) break;
      device::store_dlogits<true>(dz + at, valid(group), target - at, factor, late[k]);
    }
  }
  __device__ T* dlogits_of(int64_t row) const {
    return p.dlogits ? static_cast<T*>(p.dlogits) + row * p.dlogits_stride + first : nullptr;
  }
  __device__ void work() const {
    const int worker = threadIdx.x / 32 - 1;
    rows(
        [&](int64_t row, int64_t target, int use) {
          float late[kLate][kEach];
          const float own = own_max(logits_of(row), use, worker, late);
          if (lane < kBlocks) {
            device::store_at(&state.maxima[use % 2][rank][worker], lane, own);
            state.max_known.arrive_at(lane);
          }
          __syncwarp();
          exponentials(row_max(use), use, worker, late);
          state.factor_known.wait_for_cluster(use);
          gradient(dlogits_of(row), target - first, state.factor, worker, late);
        },
        [&](int64_t row, float value) {
          T* dz = dlogits_of(row);
          if (!dz) return;
          for (int i = threadIdx.x - 32; i < logits; i += kThreads - 32) dz[i] = T(value);
        });
  }
};

template <class T, int kBlocks>
__global__ void __cluster_dims__(kBlocks) __launch_bounds__(kThreads, 1)
    loss_whole(const __grid_constant__ LossParams p) {
  extern __shared__ float4 memory[];
  auto* slots = reinterpret_cast<float*>(memory);
  const Block<T, kBlocks> block{p, slots, *reinterpret_cast<State*>(slots + kSlots / 4)};
  if (threadIdx.x == 0) block.init();
  device::meet_cluster();
  threadIdx.x < 32 ? block.conduct() : block.work();
  __syncwarp();
  device::meet_cluster();  // none ends while another may reach its shared memory
}

template <class T>
void start(const LossParams& p, const Stream& stream) {
  const int64_t multiprocessors = gpu_properties(stream.device().index).multiprocessors;
  const int blocks = p.vocabulary <= kGroups * kGroup ? 1 : kMostBlocks;
  const LaunchShape shape{std::min(p.rows, multiprocessors / blocks) * blocks, kThreads, kShared};
  launch("cross_entropy", blocks == 1 ? loss_whole<T, 1> : loss_whole<T, kMostBlocks>, shape,
         stream, p);
}

}  // namespace

bool loss_whole_takes(int64_t vocabulary) { return vocabulary <= kMostBlocks * kGroups * kGroup; }

void loss_whole_cuda(const LossParams& p, DType dlogits, const Stream& stream) {
  with_storage(dlogits, [&](auto element) { start<decltype(element)>(p, stream); });
}

}  // namespace moiety::nn
