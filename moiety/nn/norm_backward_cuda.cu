// The backward pass of RMSNorm on GPUs, in three ways, each of which reads x, dy and the addend
// once. A thread block takes a run of norm_order's classes of rows:
// - short rows without an addend: a group of lanes takes a class; its rows wait for memory together
//   and fold their sums together;
// - rows of which shared memory holds several: a ring of rows that bulk copies fill and store,
//   warps that take a row each for its sums, and warps that take columns for dx and the weight's
//   gradient;
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
  float* partial;  // [runs, n]
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

constexpr int64_t kShortColumns = 256;
constexpr NormOrder kShortOrder = norm_order(kShortColumns),
                    kLongOrder = norm_order(kShortColumns + 1);
constexpr int kGroups = kShortOrder.run;  // of lanes; each has a class

// The sum of the run's classes, of which a group of kLanes has one and a lane an octet of columns.
template <int kLanes>
__device__ void add_classes(const float (&dg)[kOctet], int64_t n, float* partial) {
  __shared__ float kept[kGroups][kLanes * kOctet];
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    kept[threadIdx.x / kLanes][threadIdx.x % kLanes * kOctet + i] = dg[i];
  }
  __syncthreads();
  for (int c = threadIdx.x; c < n; c += kGroups * kLanes) {
    float sum = 0;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) sum += kept[g][c];
    partial[blockIdx.x * n + c] = sum;
  }
}

template <class T, int kLanes>
__global__ void __launch_bounds__(kGroups* kLanes, 512 / (kGroups * kLanes))
    norm_backward_short(const __grid_constant__ Params p) {
  constexpr int kBatch = 8 / sizeof(T);
  constexpr int kSame = kLanes / kBatch;  // lanes that know the same row
  cudaTriggerProgrammaticLaunchCompletion();
  const int lane = threadIdx.x % kLanes;
  const int64_t row0 = int64_t{blockIdx.x} * kGroups + threadIdx.x / kLanes, c = lane * kOctet;
  const int rows = device::class_rows(p.rows, row0, kShortOrder.classes);
  const int most = __shfl_sync(device::kWarp, rows, 0);  // largest count among the warp's classes
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
    Batch out{{p.map.offsets(named < rows ? row0 + named * kShortOrder.classes : 0), p.map.small}};
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
  add_classes<kLanes>(dg, p.n, p.partial);
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
  Barrier full[kMostStages], known[kMostStages], done[kMostStages];
  RingRow row[kMostStages << kMostLog];
};

// The rows of one thread block, which has a class of rows. kOctets is the number of octets of a
// thread that takes columns.
template <class T, int kOctets>
struct RingBlock {
  const Params& p;
  const NormRing& ring;
  T* staged;  // [stages][batch][tensors][n]
  RingState& state;
  int lane = threadIdx.x % 32;

  int rows = device::class_rows(p.rows, blockIdx.x, kLongOrder.classes);
  __device__ int batches() const { return ((rows - 1) >> ring.log) + 1; }
  // The number, in the tensor, of the thread block's i-th row.
  __device__ int64_t global(int i) const { return blockIdx.x + i * kLongOrder.classes; }
  __device__ int rows_of(int batch) const { return min(1 << ring.log, rows - (batch << ring.log)); }
  __device__ T* row(int stage, int i) const {
    return staged + int64_t{(stage << ring.log) + i} * ring.tensors * p.n;
  }
  // Where dx of a row is written first: over the last of the row's tensors.
  __device__ T* dx_row(int stage, int i) const { return row(stage, i) + (ring.tensors - 1) * p.n; }

  // Stores dx of a batch; then its stage may be filled again. With stores by the threads that
  // compute dx, rows of 7168 took a fifth longer (docs/adr/0043).
  __device__ void store(int b, uint32_t bytes) const {
    const int stage = b % ring.stages;
    state.done[stage].wait(b / ring.stages);
    if (lane < rows_of(b)) {
      device::bulk_store(static_cast<T*>(p.dx) + state.row[(stage << ring.log) + lane].dx,
                         dx_row(stage, lane), bytes);
    }
    device::bulk_stores_read();
    __syncwarp();
  }

  // The loop of the warp that copies: lanes issue bulk copies.
  __device__ void copy() const {
    const auto bytes = uint32_t(p.n * sizeof(T));
    const int all = batches();
    for (int b = 0; b < all; ++b) {
      const int stage = b % ring.stages, some = rows_of(b);
      Barrier& full = state.full[stage];
      if (b >= ring.stages) store(b - ring.stages, bytes);
      if (lane == 0) full.arrive_expecting(bytes * uint32_t(some * ring.tensors));
      __syncwarp();
      for (int i = lane; i < some; i += 32) {
        const auto offset = p.map.offsets(global((b << ring.log) + i));
        T* to = row(stage, i);
        bulk_copy(to, static_cast<const T*>(p.x) + offset[0], bytes, full);
        bulk_copy(to + p.n, static_cast<const T*>(p.dy) + offset[1], bytes, full);
        if (p.addend) {
          bulk_copy(to + 2 * p.n, static_cast<const T*>(p.addend) + offset[2], bytes, full);
        }
      }
    }
    for (int b = max(0, all - ring.stages); b < all; ++b) store(b, bytes);
  }

  // The loop of a warp that sums rows. As many warps work as there are, but not more than the ring
  // has rows: so a warp is at most one use of a stage ahead, which the parity of a barrier can tell
  // apart.
  __device__ void sum(int warp) const {
    const T* g = static_cast<const T*>(p.weight);
    const int warps = min(kSumWarps, ring.stages << ring.log);
    if (warp >= warps) return;
    for (int i = warp, all = batches() << ring.log; i < all; i += warps) {
      const int b = i >> ring.log, in_batch = i - (b << ring.log);
      const int stage = b % ring.stages, use = b / ring.stages;
      if (use > 0) state.done[stage].wait(use - 1);
      state.full[stage].wait(use);
      if (i < rows) {
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
      const int some = rows_of(b);
#pragma unroll(4 / kOctets)
      for (int i = 0; i < some; ++i) {
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
          store_octet<true>(dx_row(stage, i) + c, dx_octet(known.sums, x, dy, g[k], p.addend, more),
                            kOctet);
          add_gradient(dy, x, known.sums.r, dg[k]);
        }
      }
      device::fence_for_bulk();
      __syncwarp();
      if (lane == 0) state.done[stage].arrive();
      if (++stage == ring.stages) stage = 0, ++use;
    }
    float* to = p.partial + blockIdx.x * p.n;
#pragma unroll
    for (int k = 0; k < kOctets; ++k) {
      store_octet<true>(to + column(k), round_octet<float>(dg[k]), p.n - column(k));
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
      state.done[s].init(kColumnWarps);
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
    block.copy();
  }
}

// ---- other rows

constexpr int kOtherThreads = 256, kSomeRows = 64;

// Some rows of a class.
template <class T>
struct Some {
  RowSums sums[kSomeRows];
  std::array<int64_t, 4> offsets[kSomeRows];
};

// Finds the sums of `rows` rows of a class from row `row0` on, a warp those of a row.
template <class T, bool kVector>
__device__ void sum_some(const Params& p, int64_t row0, int64_t step, int rows, Some<T>& some) {
  const int lane = threadIdx.x % 32;
  const T* weight = static_cast<const T*>(p.weight);
  for (int i = threadIdx.x / 32; i < rows; i += kOtherThreads / 32) {
    const auto offset = p.map.offsets(row0 + i * step);
    const T *x = static_cast<const T*>(p.x) + offset[0],
            *dy = static_cast<const T*>(p.dy) + offset[1];
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
    if (lane == 0) some.sums[i] = known, some.offsets[i] = offset;
  }
}

// dx of these rows in the columns from c on; adds their terms to the class's sum.
template <class T, bool kVector>
__device__ void take_columns(const Params& p, int64_t c, int rows, const Some<T>& some,
                             float (&dg)[kOctet]) {
  const int64_t valid = p.n - c;
  const T* addend = static_cast<const T*>(p.addend);
  const Octet<T> g = load_octet<kVector>(static_cast<const T*>(p.weight) + c, valid);
  for (int i = 0; i < rows; ++i) {
    const auto& offset = some.offsets[i];
    const Octet<T> x = load_octet<kVector>(static_cast<const T*>(p.x) + offset[0] + c, valid);
    const Octet<T> dy = load_octet<kVector>(static_cast<const T*>(p.dy) + offset[1] + c, valid);
    Octet<T> more;
    if (addend) more = load_octet<kVector>(addend + offset[2] + c, valid);
    store_octet<kVector>(static_cast<T*>(p.dx) + offset[3] + c,
                         dx_octet(some.sums[i], x, dy, g, addend, more), valid);
    add_gradient(dy, x, some.sums[i].r, dg);
  }
}

template <class T, bool kVector>
__global__ void __launch_bounds__(kOtherThreads)
    norm_backward_other(const __grid_constant__ Params p) {
  __shared__ Some<T> some;
  __shared__ float kept[kShortColumns];  // the sum of a class of short rows so far
  cudaTriggerProgrammaticLaunchCompletion();
  const NormOrder order = norm_order(p.n);
  float* run = p.partial + blockIdx.x * p.n;
  float* sum = order.run > 1 ? kept : run;
  for (int j = 0; j < order.run; ++j) {
    const int64_t row0 = blockIdx.x * order.run + j;
    const int rows = device::class_rows(p.rows, row0, order.classes);
    for (int begin = 0; begin < rows; begin += kSomeRows) {
      const int now = min(kSomeRows, rows - begin);
      __syncthreads();
      sum_some<T, kVector>(p, row0 + begin * order.classes, order.classes, now, some);
      __syncthreads();
      for (int64_t c = threadIdx.x * kOctet; c < p.n; c += kOtherThreads * kOctet) {
        float dg[kOctet] = {};
        if (begin > 0) {
          const Octet<float> before = load_octet<false>(sum + c, p.n - c);
#pragma unroll
          for (int i = 0; i < kOctet; ++i) dg[i] = before[i];
        }
        take_columns<T, kVector>(p, c, now, some, dg);
        store_octet<false>(sum + c, round_octet<float>(dg), p.n - c);
        if (order.run == 1 || begin + now < rows) continue;
        for (int64_t i = c; i < min(p.n, c + kOctet); ++i) {
          run[i] = j == 0 ? kept[i] : run[i] + kept[i];
        }
      }
    }
  }
}

KernelStart<Params> start_backward(const NormKernel& chosen, const Params& p) {
  const int64_t blocks = norm_blocks(p.rows, p.n);
  return start_of<kNormBackwardKernels>(chosen, [&]<NormKernel k>() -> KernelStart<Params> {
    using T = std::conditional_t<k.dtype == DType::kFloat32, float, bf16>;
    if constexpr (k.family == NormFamily::kShort) {
      constexpr int kLanes = k.columns / kOctet;
      return {norm_backward_short<T, kLanes>, {blocks, kGroups * kLanes}};
    } else if constexpr (k.family == NormFamily::kRing) {
      return {norm_backward_ring<T, k.columns / (kColumnThreads * kOctet)>,
              {blocks, kRingThreads, p.ring.bytes()}};
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
  const auto start = start_backward(choose_norm_backward(traits, p.ring), p);
  launch("norm_backward", start.kernel, start.shape, stream, p);
  const device::NormSum sum{a.workspace.data<float>(), a.workspace.size(0), a.grad_D.data<float>(),
                            a.accumulate};
  launch("norm_backward", device::sum_norm_blocks<1>,
         {.blocks = blocks_for(n, 32), .threads = device::kSumThreads, .early = true}, stream,
         std::array{sum}, n);
}

}  // namespace moiety::nn
