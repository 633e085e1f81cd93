// Cross-entropy on GPUs. A cluster of thread blocks reads a row once and keeps it in shared memory:
// the logits, then their exponentials, from which it writes the gradient. A block has the logits of
// some lanes of lane_sum, whose sums one warp adds in order while the others compute exponentials.
#include <cooperative_groups.h>
#include <cuda_pipeline.h>

#include "moiety/base/launch.cuh"
#include "moiety/base/math.h"
#include "moiety/formats/bf16.h"
#include "moiety/formats/fp32.h"
#include "moiety/formats/octet.cuh"
#include "moiety/nn/element.h"
#include "moiety/nn/loss.h"
#include "moiety/nn/loss_kernel.h"

namespace moiety::nn {
namespace {

namespace cg = cooperative_groups;

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr uint32_t kWarp = 0xFFFFFFFFu;

struct Params {
  const float* logits;
  int64_t logits_stride;
  const int32_t* target;
  const uint8_t* mask;  // may be null
  float* loss;
  void* dlogits;  // may be null
  int64_t dlogits_stride;
  int64_t vocabulary;
  LossShape shape;
  float z_coef;
};

// Shared memory of a block before its logits.
struct alignas(16) State {
  float warp_max[kWarps];
  float max;       // of the block's logits
  float factor;    // of the exponentials in the gradient
  float sums[32];  // of the block's lanes
};
static_assert(sizeof(State) <= LossShape::kStateBytes);

__device__ float warp_max(float v) {
#pragma unroll
  for (int o = 16; o >= 1; o /= 2) v = fmaxf(v, __shfl_xor_sync(kWarp, v, o));
  return v;
}

// The maximum over all threads; fmaxf passes over NaN.
__device__ float block_max(float v, State& state) {
  v = warp_max(v);
  if (threadIdx.x % 32 == 0) state.warp_max[threadIdx.x / 32] = v;
  __syncthreads();
  return warp_max(state.warp_max[threadIdx.x % kWarps]);
}

// The sum over the lanes of lane_sum, one in each lane of the warp.
__device__ float fold(float sum) {
#pragma unroll
  for (int o = 16; o >= 1; o /= 2) sum += __shfl_xor_sync(kWarp, sum, o);
  return sum;
}

// What a row's sum gives: its loss, and the factor of its exponentials in the gradient.
struct RowResult {
  float loss, factor;
};
__device__ RowResult result(const Params& p, float max, float sum, float at_target) {
  const float lse = max + log(sum);
  return {lse - at_target, (1 + 2 * p.z_coef * lse) * (1 / sum)};
}

// Whether a row has no target, or an invalid one. Then it is filled, by `blocks` blocks of which
// this is number `rank`.
template <class T>
__device__ bool fill_without_target(const Params& p, int64_t n, int blocks, int rank) {
  const int64_t target = p.target[n];
  const bool none = target == kIgnoredTarget || (p.mask && p.mask[n] == 0);
  if (!none && target >= 0 && target < p.vocabulary) return false;
  const float value = none ? 0.0f : kCanonicalNan;
  if (rank == 0 && threadIdx.x == 0) p.loss[n] = value;
  if (!p.dlogits) return true;
  T* dz = static_cast<T*>(p.dlogits) + n * p.dlogits_stride;
  for (int64_t i = rank * kThreads + threadIdx.x; i < p.vocabulary; i += blocks * kThreads) {
    dz[i] = T(value);
  }
  return true;
}

// A block's part of a row in shared memory. Rows of vectors are whole fours of logits at multiples
// of 16 bytes.
template <bool kVector>
struct Part {
  static constexpr int kWidth = kVector ? 4 : 1;
  float* kept;
  int size;      // logits
  int turn_log;  // of the logits of a turn
  int rank;
  int64_t n;  // the vocabulary

  // The place in the row of the logit at `i`; it may be past the end.
  __device__ int64_t column(int i) const {
    const int turn = i >> turn_log;
    return int64_t{turn} * LossShape::kTurn + (rank << turn_log) + (i - (turn << turn_log));
  }
  __device__ float4& four(int i) const { return *reinterpret_cast<float4*>(kept + i); }

  // Brings the logits; past the end of the row they are -inf, whose exponential is 0. Each thread
  // waits for those that it brought, and returns their maximum.
  __device__ float bring(const float* z) const {
    for (int i = threadIdx.x * kWidth; i < size; i += kThreads * kWidth) {
      const int64_t c = column(i);
      if (c < n) {
        __pipeline_memcpy_async(kept + i, z + c, kWidth * sizeof(float));
      } else {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) kept[i + j] = -INFINITY;
      }
    }
    __pipeline_commit();
    __pipeline_wait_prior(0);
    float max = -INFINITY;
#pragma unroll 4
    for (int i = threadIdx.x * kWidth; i < size; i += kThreads * kWidth) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) max = fmaxf(max, kept[i + j]);
    }
    return max;
  }

  // Puts exponentials in the place of the logits [begin, end), by `threads` threads.
  __device__ void exponentials(int begin, int end, int thread, int threads, float max) const {
#pragma unroll 2
    for (int i = begin + 4 * thread; i < end; i += 4 * threads) {
      const float4 z = four(i);
      four(i) = make_float4(exp_nonpositive(z.x - max), exp_nonpositive(z.y - max),
                            exp_nonpositive(z.z - max), exp_nonpositive(z.w - max));
    }
  }

  // Adds the exponentials [begin, end), whole fours of turns, to the sum of a lane of lane_sum;
  // `first` is its place in a turn. Additions wait for each other while loads run ahead of them.
  __device__ float add(int begin, int end, int first, float sum) const {
    constexpr int kAhead = LossShape::kTurnsAtATime;
    float4 low[kAhead], high[kAhead];
    const auto load = [&](int i, int turn) {
      low[i] = four(turn + first);
      high[i] = four(turn + first + 4);
    };
    const int turn = 1 << turn_log;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load(i, begin + i * turn);
    for (; begin < end; begin += kAhead * turn) {
      const int next = begin + kAhead * turn;
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        sum += low[i].x;
        sum += low[i].y;
        sum += low[i].z;
        sum += low[i].w;
        sum += high[i].x;
        sum += high[i].y;
        sum += high[i].z;
        sum += high[i].w;
        if (next < end) load(i, next + i * turn);
      }
    }
    return sum;
  }

  // The sum of each of the block's lanes, in the lanes of warp `adder`; the other warps compute the
  // exponentials of a tile while it adds those of the tile before.
  __device__ float sum(float max, int adder) const {
    constexpr int kTurns = 32;  // of a tile
    const int warp = threadIdx.x / 32, tile = kTurns << turn_log;
    const int thread = (warp - (warp > adder)) * 32 + int(threadIdx.x % 32);
    const int first = threadIdx.x * kOctet & ((1 << turn_log) - 1);
    float sum = 0;
    for (int begin = 0; begin < size + tile; begin += tile) {
      if (warp != adder) {
        exponentials(begin, min(begin + tile, size), thread, kThreads - 32, max);
      } else if (begin > 0) {
        sum = add(begin - tile, min(begin, size), first, sum);
      }
      __syncthreads();
    }
    return sum;
  }

  template <class T>
  __device__ void store_gradient(float factor, int64_t target, T* dz) const {
#pragma unroll 4
    for (int i = threadIdx.x * kWidth; i < size; i += kThreads * kWidth) {
      const int64_t c = column(i);
      if (c >= n) continue;
      float v[kWidth];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        v[j] = factor * kept[i + j];
        if (c + j == target) v[j] = v[j] - 1;
      }
      if constexpr (!kVector) {
        dz[c] = T(v[0]);
      } else if constexpr (sizeof(T) == 2) {
        *reinterpret_cast<uint2*>(dz + c) =
            make_uint2(bf16_word(v[0], v[1]), bf16_word(v[2], v[3]));
      } else {
        *reinterpret_cast<float4*>(dz + c) = make_float4(v[0], v[1], v[2], v[3]);
      }
    }
  }
};

// dlogits may lie in the memory of the logits: no block of a cluster writes before all have read.
template <class T, bool kVector>
__global__ void __launch_bounds__(kThreads, 4) loss_rows(const __grid_constant__ Params p) {
  extern __shared__ float4 memory[];
  State& state = *reinterpret_cast<State*>(memory);
  const cg::cluster_group cluster = cg::this_cluster();
  const int log = p.shape.log, blocks = 1 << log, rank = int(cluster.block_rank());
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t n = blockIdx.x >> log;
  if (fill_without_target<T>(p, n, blocks, rank)) return;
  const Part<kVector> part{reinterpret_cast<float*>(memory) + LossShape::kStateBytes / 4,
                           int(p.shape.part()), 8 - log, rank, p.vocabulary};
  const float* z = p.logits + n * p.logits_stride;
  const int64_t target = p.target[n];
  const float at_target = z[target];
  const float own_max = block_max(part.bring(z), state);
  if (threadIdx.x == 0) state.max = own_max;
  cluster.sync();
  const float max = warp_max(*cluster.map_shared_rank(&state.max, lane % blocks));
  // Another warp in other rows: so the adding warps of a multiprocessor do not share a scheduler.
  const int adder = int(n % kWarps);
  const float sum = part.sum(max, adder);
  const int lanes = 32 >> log;  // of lane_sum, that the block has
  if (warp == adder && lane < lanes) state.sums[lane] = sum;
  cluster.sync();
  if (warp == adder) {
    const float all = fold(*cluster.map_shared_rank(&state.sums[lane % lanes], lane / lanes));
    const RowResult row = result(p, max, all, at_target);
    if (lane == 0) state.factor = row.factor;
    if (lane == 0 && rank == 0) p.loss[n] = row.loss;
  }
  __syncthreads();
  auto read = cluster.barrier_arrive();  // this block reads no other's memory any more
  if (p.dlogits) {
    part.store_gradient(state.factor, target, static_cast<T*>(p.dlogits) + n * p.dlogits_stride);
  }
  cluster.barrier_wait(std::move(read));
}

// A row that no cluster keeps is read three times by one block.
template <class T>
__global__ void __launch_bounds__(kThreads) loss_long_rows(const __grid_constant__ Params p) {
  __shared__ State state;
  const int64_t n = blockIdx.x, target = p.target[n];
  if (fill_without_target<T>(p, n, 1, 0)) return;
  const float* z = p.logits + n * p.logits_stride;
  const float at_target = z[target];
  float max = -INFINITY;
  for (int64_t i = threadIdx.x; i < p.vocabulary; i += kThreads) max = fmaxf(max, z[i]);
  max = block_max(max, state);
  if (threadIdx.x < 32) {
    float sum = 0;
    for (int64_t i = threadIdx.x * kOctet; i < p.vocabulary; i += LossShape::kTurn) {
      for (int64_t j = i; j < min(i + kOctet, p.vocabulary); ++j)
        sum += exp_nonpositive(z[j] - max);
    }
    sum = fold(sum);
    const RowResult row = result(p, max, sum, at_target);
    if (threadIdx.x == 0) state.factor = row.factor, p.loss[n] = row.loss;
  }
  __syncthreads();
  if (!p.dlogits) return;
  T* dz = static_cast<T*>(p.dlogits) + n * p.dlogits_stride;
  for (int64_t base = 0; base < p.vocabulary; base += kThreads) {
    const int64_t i = base + threadIdx.x;
    const float e = i < p.vocabulary ? state.factor * exp_nonpositive(z[i] - max) : 0.0f;
    __syncthreads();  // dz may be z: a write is always behind what all have read
    if (i < p.vocabulary) dz[i] = T(i == target ? e - 1 : e);
  }
}

}  // namespace

void cross_entropy_cuda(const CrossEntropyArgs& a, const Stream& stream) {
  const TensorView& dz = a.dlogits_NV;
  const int64_t rows = a.logits_NV.size(0), vocabulary = a.logits_NV.size(1);
  const LossShape shape =
      choose_loss(vocabulary, gpu_properties(stream.device().index).shared_block);
  const Params p{a.logits_NV.data<float>(),
                 a.logits_NV.stride(0),
                 a.target_N.data<int32_t>(),
                 a.mask_N.data<uint8_t>(),
                 a.loss_N.data<float>(),
                 dz.raw(),
                 dz.defined() ? dz.stride(0) : 0,
                 vocabulary,
                 shape,
                 a.z_coef};
  const auto fours = [](const TensorView& x) {
    return x.size(1) % 4 == 0 && x.stride(0) % 4 == 0 &&
           reinterpret_cast<uintptr_t>(x.raw()) % 16 == 0;
  };
  const bool vector = fours(a.logits_NV) && (!dz.defined() || fours(dz));
  with_storage(dz.defined() ? dz.dtype() : DType::kFloat32, [&](auto element) {
    using T = decltype(element);
    if (!shape.kept) {
      return launch("cross_entropy", loss_long_rows<T>, {rows, kThreads}, stream, p);
    }
    launch("cross_entropy", vector ? loss_rows<T, true> : loss_rows<T, false>,
           {.blocks = rows << shape.log,
            .threads = kThreads,
            .shared_bytes = shape.bytes(),
            .cluster = 1 << shape.log},
           stream, p);
  });
}

}  // namespace moiety::nn
