// The backward pass of RMSNorm on GPUs, in three ways, each of which reads x, dy and the addend
// once:
// - short rows without an addend: a group of lanes takes a block of rows; its rows wait for memory
//   together and fold their sums together;
// - rows of which shared memory holds several: a ring of rows that bulk copies fill, warps that
//   take a row each for its sums, and warps that take columns for dx and the weight's gradient;
// - all other rows, aligned or not: sums first, then columns, which read the row again.
#include <algorithm>
#include <type_traits>

#include "moiety/base/kernel_list.cuh"
#include "moiety/formats/bf16.h"
#include "moiety/nn/barrier.cuh"
#include "moiety/nn/norm.h"
#include "moiety/nn/norm_device.cuh"
#include "moiety/nn/norm_kernel.h"
#include "moiety/nn/norm_sum.cuh"
#include "moiety/nn/row_map.cuh"
#include "moiety/nn/rows.h"

namespace moiety::nn {
namespace {

struct Params {
  const void *x, *weight, *dy, *addend;  // the addend may be null
  void* dx;
  float* partial;  // [blocks, n]
  RowMap<4> map;   // x, dy, addend, dx
  int64_t rows, n;
  device::RowLength length;
  float eps;
  NormRing ring;
};

using device::add_dot, device::Barrier, device::bulk_copy, device::dx_octet, device::RowSums;

__device__ RowSums row_sums(const Params& p, float squares, float dot) {
  return device::row_sums(p.length, p.eps, squares, dot);
}

template <class T>
__device__ void add_gradient(const Octet<T>& dy, const Octet<T>& x, float r, float (&dg)[kOctet]) {
#pragma unroll
  for (int i = 0; i < kOctet; ++i) dg[i] = __fmaf_rn(dy[i], x[i] * r, dg[i]);
}

// ---- short rows

constexpr int kShortThreads = 128;

template <class T, int kLanes>
__global__ void __launch_bounds__(kShortThreads, 4)
    norm_backward_short(const __grid_constant__ Params p) {
  constexpr int kGroups = kShortThreads / kLanes, kBatch = 8 / sizeof(T);
  constexpr int kSame = kLanes / kBatch;  // lanes that know the same row
  cudaTriggerProgrammaticLaunchCompletion();
  const int lane = threadIdx.x % kLanes;
  const int64_t block = int64_t{blockIdx.x} * kGroups + threadIdx.x / kLanes;
  const int64_t row0 = block * kNormBlockRows, c = lane * kOctet;
  const int rows = int(max(int64_t{0}, min(kNormBlockRows, p.rows - row0)));
  const int most = __shfl_sync(device::kWarp, rows, 0);  // largest count among the warp's blocks
  const auto at = [&](const void* base, int64_t offset) {
    return static_cast<const T*>(base) + offset + c;
  };
  const Octet<T> g = load_octet<true>(at(p.weight, 0), p.n - c);
  float dg[kOctet] = {};
  struct Batch {
    device::RowOffsets<kLanes, 4> offsets;
    Octet<T> x[kBatch], dy[kBatch];
  };
  const auto bring = [&](int b) {
    const int named = b + lane % kBatch;
    Batch out{{p.map.offsets(named < rows ? row0 + named : 0), p.map.small}};
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int64_t from_x = out.offsets.of(0, j), from_dy = out.offsets.of(1, j);
      const int64_t valid = b + j < rows ? p.n - c : 0;
      out.x[j] = load_octet<true>(at(p.x, from_x), valid);
      out.dy[j] = load_octet<true>(at(p.dy, from_dy), valid);
    }
    return out;
  };
  Batch next = bring(0);
  for (int b = 0; b < most; b += kBatch) {
    Batch now = next;
    if (b + kBatch < most) next = bring(b + kBatch);  // loads while this batch is computed
    auto& [offsets, x, dy] = now;
    float squares[kBatch], dots[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      squares[j] = device::add_products(x[j], x[j], 0.0f);
      dots[j] = add_dot(g, dy[j], x[j], 0.0f);
    }
    const float all_squares = device::fold_rows<kLanes>(squares);
    const RowSums known = row_sums(p, all_squares, device::fold_rows<kLanes>(dots));
    device::keep_packed(x, dy);
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const RowSums s{__shfl_sync(device::kWarp, known.r, j * kSame, kLanes),
                      __shfl_sync(device::kWarp, known.factor, j * kSame, kLanes)};
      const int64_t to = offsets.of(3, j);
      if (b + j >= rows) continue;
      store_octet<true>(static_cast<T*>(p.dx) + to + c, dx_octet(s, x[j], dy[j], g, false, {}),
                        p.n - c);
      add_gradient(dy[j], x[j], s.r, dg);
    }
  }
  if (rows > 0) store_octet<true>(p.partial + block * p.n + c, round_octet<float>(dg), p.n - c);
}

// ---- a ring of rows

constexpr int kColumnWarps = 8, kSumWarps = 7, kColumnThreads = 32 * kColumnWarps;
constexpr int kRingThreads = kColumnThreads + 32 * kSumWarps + 32;
constexpr int kMostStages = NormRing::kMostStages, kMostLog = NormRing::kMostLog;

struct RingRow {
  RowSums sums;
  int64_t dx;  // offset of the row in dx
};

struct RingState {
  Barrier full[kMostStages], known[kMostStages], empty[kMostStages];
  RingRow row[kMostStages << kMostLog];
};

// The rows of one thread block, which takes every gridDim.x-th block of rows. kOctets is the number
// of octets of a thread that takes columns.
template <class T, int kOctets>
struct RingBlock {
  const Params& p;
  const NormRing& ring;
  T* staged;  // [stages][batch][tensors][n]
  RingState& state;
  int lane = threadIdx.x % 32;

  __device__ int rows() const {  // counts also rows past the end of the last block
    const int64_t blocks = (p.rows + kNormBlockRows - 1) / kNormBlockRows;
    return int((blocks - 1 - blockIdx.x) / gridDim.x + 1) * int(kNormBlockRows);
  }
  __device__ int batches() const { return rows() >> ring.log; }
  // The number, in the tensor, of the thread block's i-th row.
  __device__ int64_t global(int i) const {
    constexpr int kRows = int(kNormBlockRows);
    return (int64_t{i / kRows} * gridDim.x + blockIdx.x) * kRows + i % kRows;
  }
  __device__ int rows_of(int batch) const {
    return int(max(int64_t{0}, min(int64_t{1} << ring.log, p.rows - global(batch << ring.log))));
  }
  __device__ T* row(int stage, int i) const {
    return staged + int64_t{(stage << ring.log) + i} * ring.tensors * p.n;
  }

  // The loop of the warp that copies: lanes issue bulk copies.
  __device__ void bring() const {
    const auto bytes = uint32_t(p.n * sizeof(T));
    for (int b = 0, all = batches(); b < all; ++b) {
      const int stage = b % ring.stages, use = b / ring.stages, rows = rows_of(b);
      Barrier& full = state.full[stage];
      if (use > 0) state.empty[stage].wait(use - 1);
      if (lane == 0) full.arrive_expecting(bytes * uint32_t(rows * ring.tensors));
      __syncwarp();
      for (int i = lane; i < rows; i += 32) {
        const auto offset = p.map.offsets(global((b << ring.log) + i));
        T* to = row(stage, i);
        bulk_copy(to, static_cast<const T*>(p.x) + offset[0], bytes, full);
        bulk_copy(to + p.n, static_cast<const T*>(p.dy) + offset[1], bytes, full);
        if (p.addend) {
          bulk_copy(to + 2 * p.n, static_cast<const T*>(p.addend) + offset[2], bytes, full);
        }
      }
    }
  }

  // The loop of a warp that sums rows. As many warps work as there are, but not more than the ring
  // has rows: so a warp is at most one use of a stage ahead, which the parity of a barrier can tell
  // apart.
  __device__ void sum(int warp) const {
    const T* g = static_cast<const T*>(p.weight);
    const int warps = min(kSumWarps, ring.stages << ring.log);
    if (warp >= warps) return;
    for (int i = warp, all = rows(); i < all; i += warps) {
      const int b = i >> ring.log, in_batch = i - (b << ring.log);
      const int stage = b % ring.stages, use = b / ring.stages;
      if (use > 0) state.empty[stage].wait(use - 1);
      state.full[stage].wait(use);
      if (global(i) < p.rows) {
        const int64_t dx = p.map.offsets(global(i))[3];
        const T* x = row(stage, in_batch);
        float squares = 0, dot = 0;
#pragma unroll 4
        for (int64_t c = lane * kOctet; c < p.n; c += 32 * kOctet) {
          const Octet<T> xs = load_octet<true>(x + c, kOctet);
          const Octet<T> dys = load_octet<true>(x + p.n + c, kOctet);
          squares = device::add_products(xs, xs, squares);
          dot = add_dot(load_octet<true>(g + c, kOctet), dys, xs, dot);
        }
        squares = device::fold<32>(squares);
        const RingRow known{row_sums(p, squares, device::fold<32>(dot)), dx};
        if (lane == 0) state.row[(stage << ring.log) + in_batch] = known;
      }
      if (lane == 0) state.known[stage].arrive();
    }
  }

  __device__ void columns() const {
    Octet<T> g[kOctets];
    float dg[kOctets][kOctet] = {};
    const auto column = [&](int k) {
      return int64_t{k * kColumnThreads + int(threadIdx.x)} * kOctet;
    };
#pragma unroll
    for (int k = 0; k < kOctets; ++k) {
      g[k] = load_octet<true>(static_cast<const T*>(p.weight) + column(k), p.n - column(k));
    }
    int stage = 0, use = 0;
    for (int b = 0, all = batches(); b < all; ++b) {
      state.full[stage].wait(use);
      state.known[stage].wait(use);
      const int rows = rows_of(b);
#pragma unroll(4 / kOctets)
      for (int i = 0; i < rows; ++i) {
        const RingRow known = state.row[(stage << ring.log) + i];
#pragma unroll
        for (int k = 0; k < kOctets; ++k) {
          const int64_t c = column(k);
          if (c >= p.n) break;
          const T* staged_row = row(stage, i) + c;
          const Octet<T> x = load_octet<true>(staged_row, kOctet);
          const Octet<T> dy = load_octet<true>(staged_row + p.n, kOctet);
          Octet<T> more;
          if (p.addend) more = load_octet<true>(staged_row + 2 * p.n, kOctet);
          store_octet<true>(static_cast<T*>(p.dx) + known.dx + c,
                            dx_octet(known.sums, x, dy, g[k], p.addend, more), kOctet);
          add_gradient(dy, x, known.sums.r, dg[k]);
        }
      }
      __syncwarp();
      if (lane == 0) state.empty[stage].arrive();
      if ((b + 1 << ring.log) % kNormBlockRows == 0) {
        float* to = p.partial + global(b << ring.log) / kNormBlockRows * p.n;
#pragma unroll
        for (int k = 0; k < kOctets; ++k) {
          store_octet<true>(to + column(k), round_octet<float>(dg[k]), p.n - column(k));
#pragma unroll
          for (float& v : dg[k]) v = 0;
        }
      }
      if (++stage == ring.stages) stage = 0, ++use;
    }
  }
};

template <class T, int kOctets>
__global__ void __launch_bounds__(kRingThreads, 1)
    norm_backward_ring(const __grid_constant__ Params p) {
  extern __shared__ uint4 memory[];
  __shared__ RingState state;
  cudaTriggerProgrammaticLaunchCompletion();
  if (threadIdx.x == 0) {
    for (int s = 0; s < p.ring.stages; ++s) {
      state.full[s].init(1);
      state.known[s].init(1 << p.ring.log);
      state.empty[s].init(kColumnWarps);
    }
    device::fence_init();
  }
  __syncthreads();
  const RingBlock<T, kOctets> block{p, p.ring, reinterpret_cast<T*>(memory), state};
  const int warp = threadIdx.x / 32;
  if (warp < kColumnWarps) {
    block.columns();
  } else if (warp < kColumnWarps + kSumWarps) {
    block.sum(warp - kColumnWarps);
  } else {
    block.bring();
  }
}

// ---- other rows

constexpr int kOtherThreads = 256;

template <class T, bool kVector>
__global__ void __launch_bounds__(kOtherThreads)
    norm_backward_other(const __grid_constant__ Params p) {
  __shared__ RowSums sums[kNormBlockRows];
  __shared__ std::array<int64_t, 4> offsets[kNormBlockRows];
  cudaTriggerProgrammaticLaunchCompletion();
  const int64_t row0 = blockIdx.x * kNormBlockRows;
  const int rows = int(min(kNormBlockRows, p.rows - row0)), lane = threadIdx.x % 32;
  const T *all_x = static_cast<const T*>(p.x), *all_dy = static_cast<const T*>(p.dy);
  const T *weight = static_cast<const T*>(p.weight), *addend = static_cast<const T*>(p.addend);
  for (int i = threadIdx.x / 32; i < rows; i += kOtherThreads / 32) {
    const auto offset = p.map.offsets(row0 + i);
    const T *x = all_x + offset[0], *dy = all_dy + offset[1];
    float squares = 0, dot = 0;
#pragma unroll 4
    for (int64_t c = lane * kOctet; c < p.n; c += 32 * kOctet) {
      const Octet<T> xs = load_octet<kVector>(x + c, p.n - c);
      const Octet<T> dys = load_octet<kVector>(dy + c, p.n - c);
      squares = device::add_products(xs, xs, squares);
      dot = add_dot(load_octet<kVector>(weight + c, p.n - c), dys, xs, dot);
    }
    squares = device::fold<32>(squares);
    const RowSums known = row_sums(p, squares, device::fold<32>(dot));
    if (lane == 0) sums[i] = known, offsets[i] = offset;
  }
  __syncthreads();
  for (int64_t c = threadIdx.x * kOctet; c < p.n; c += kOtherThreads * kOctet) {
    const int64_t valid = p.n - c;
    const Octet<T> g = load_octet<kVector>(weight + c, valid);
    float dg[kOctet] = {};
    for (int i = 0; i < rows; ++i) {
      const auto& offset = offsets[i];
      const Octet<T> x = load_octet<kVector>(all_x + offset[0] + c, valid);
      const Octet<T> dy = load_octet<kVector>(all_dy + offset[1] + c, valid);
      Octet<T> more;
      if (addend) more = load_octet<kVector>(addend + offset[2] + c, valid);
      store_octet<kVector>(static_cast<T*>(p.dx) + offset[3] + c,
                           dx_octet(sums[i], x, dy, g, addend, more), valid);
      add_gradient(dy, x, sums[i].r, dg);
    }
    store_octet<kVector>(p.partial + blockIdx.x * p.n + c, round_octet<float>(dg), valid);
  }
}

KernelStart<Params> start_backward(const NormKernel& chosen, const Params& p, int multiprocessors) {
  const int64_t blocks = norm_blocks(p.rows);
  return start_of<kNormBackwardKernels>(chosen, [&]<NormKernel k>() -> KernelStart<Params> {
    using T = std::conditional_t<k.dtype == DType::kFloat32, float, bf16>;
    if constexpr (k.family == NormFamily::kShort) {
      constexpr int kLanes = k.columns / kOctet;
      return {norm_backward_short<T, kLanes>,
              {blocks_for(blocks, kShortThreads / kLanes), kShortThreads}};
    } else if constexpr (k.family == NormFamily::kRing) {
      return {norm_backward_ring<T, k.columns / (kColumnThreads * kOctet)>,
              {std::min<int64_t>(blocks, multiprocessors), kRingThreads, p.ring.bytes()}};
    } else {
      return {norm_backward_other<T, k.family == NormFamily::kLong>, {blocks, kOtherThreads}};
    }
  });
}

}  // namespace

void norm_backward_cuda(const NormBackwardArgs& a, const Stream& stream) {
  const int64_t n = a.x.size(-1);
  const bool octets = octets_fit({&a.x, &a.dy, &a.addend, &a.dx, &a.weight_D, &a.workspace});
  const NormTraits traits{a.x.dtype(), n, octets, a.addend.defined()};
  const GpuProperties& gpu = gpu_properties(stream.device().index);
  const Params p{a.x.raw(),
                 a.weight_D.raw(),
                 a.dy.raw(),
                 a.addend.raw(),
                 a.dx.raw(),
                 a.workspace.data<float>(),
                 RowMap<4>({&a.x, &a.dy, &a.addend, &a.dx}),
                 row_count(a.x),
                 n,
                 device::row_length(n),
                 a.eps,
                 norm_ring(traits, gpu.shared_block - int64_t{sizeof(RingState)})};
  const auto start = start_backward(choose_norm_backward(traits, p.ring), p, gpu.multiprocessors);
  launch("norm_backward", start.kernel, start.shape, stream, p);
  const device::NormSum sum{a.workspace.data<float>(), a.workspace.size(0), a.grad_D.data<float>(),
                            a.accumulate};
  launch("norm_backward", device::sum_norm_blocks<1>,
         {.blocks = blocks_for(n, 32), .threads = device::kSumThreads, .early = true}, stream,
         std::array{sum}, n);
}

}  // namespace moiety::nn
