// A block of the grid is a block of the sum over rows. Batches of its rows are staged in shared
// memory, the next one while this one is computed: groups of lanes take rows for their sums, as
// forward does; then threads take columns and go down the rows for the weight's gradient. dx comes
// with the columns where rows are wide, else with the sums.
#include <algorithm>

#include "moiety/base/launch.cuh"
#include "moiety/model/element.h"
#include "moiety/model/norm.h"
#include "moiety/model/norm_device.cuh"
#include "moiety/model/row_map.cuh"
#include "moiety/model/rows.h"

namespace moiety::model {
namespace {

constexpr int kThreads = 256;

struct Params {
  const void *x, *weight, *dy, *addend;  // addend: may be null
  void* dx;
  float* partial;  // [blocks, n]
  RowMap<4> map;   // x, dy, addend, dx
  int64_t rows, n;
  float eps;
  int64_t pitch;              // elements of a staged row
  int batch = 0, stages = 0;  // rows of a batch; batches that are staged at a time: 1 or 2
};

// Eight elements to shared memory; those that do not exist are not written.
template <bool kVector, class T>
__device__ void stage_octet(T* to, const T* from, int64_t valid) {
  if constexpr (kVector) {
#pragma unroll
    for (int i = 0; i < kOctet; i += 16 / int(sizeof(T))) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                       uint32_t(__cvta_generic_to_shared(to + i))),
                   "l"(from + i)
                   : "memory");
    }
  } else {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      if (i < valid) to[i] = from[i];
    }
  }
}

// What is known of the rows of a batch.
struct RowSums {
  float r, factor;
  int64_t addend, dx;  // offsets
};

// One block of rows. Staged rows lie as x, dy, x, dy ...
template <class T, bool kVector, int kLanes, bool kWide>
struct Block {
  static constexpr int kGroups = kThreads / kLanes;
  const Params& p;
  T* staged;      // [stages][batch][2][pitch]
  float* dg;      // [n]
  RowSums* sums;  // [batch]
  int64_t row0, rows;
  int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;

  __device__ T* buffer(int batch) const {
    return staged + batch % p.stages * p.batch * 2 * p.pitch;
  }
  __device__ int rows_of(int batch) const {
    return int(min(int64_t{p.batch}, rows - int64_t{batch} * p.batch));
  }
  __device__ void stage(int batch) const {
    for (int i = group; i < 2 * rows_of(batch); i += kGroups) {
      const auto offset = p.map.offsets(row0 + batch * p.batch + i / 2);
      const T* from =
          i % 2 ? static_cast<const T*>(p.dy) + offset[1] : static_cast<const T*>(p.x) + offset[0];
      T* to = buffer(batch) + i * p.pitch;
      for (int64_t c = lane * kOctet; c < p.n; c += kLanes * kOctet) {
        stage_octet<kVector>(to + c, from + c, p.n - c);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  // dx of eight elements.
  __device__ void store_dx(const RowSums& s, int64_t c, const Octet<T>& x, const Octet<T>& dy,
                           const Octet<T>& g) const {
    float v[kOctet];
#pragma unroll
    for (int i = 0; i < kOctet; ++i) v[i] = s.r * (g[i] * dy[i]) - s.factor * x[i];
    if (p.addend) {
      const Octet<T> more =
          load_octet<kVector>(static_cast<const T*>(p.addend) + s.addend + c, p.n - c);
#pragma unroll
      for (int i = 0; i < kOctet; ++i) v[i] = more[i] + v[i];
    }
    store_octet<kVector>(static_cast<T*>(p.dx) + s.dx + c, round_octet<T>(v), p.n - c);
  }
  // Whole warps go through it together.
  __device__ void sum_rows(int batch) const {
    constexpr int kOfWarp = 32 / kLanes;
    const T* g = static_cast<const T*>(p.weight);
    for (int s0 = threadIdx.x / 32 * kOfWarp; s0 < rows_of(batch); s0 += kGroups) {
      const int s = s0 + group % kOfWarp;
      const int64_t n = s < rows_of(batch) ? p.n : 0;
      const T* x = buffer(batch) + 2 * s * p.pitch;
      const T* dy = x + p.pitch;
      float squares = 0, dot = 0;
#pragma unroll 2
      for (int64_t c = lane * kOctet; c < n; c += kLanes * kOctet) {
        const Octet<T> xs = load_octet<kVector>(x + c, n - c);
        const Octet<T> dys = load_octet<kVector>(dy + c, n - c);
        const Octet<T> gs = load_octet<kVector>(g + c, n - c);
        squares = device::add_products(xs, xs, squares);
#pragma unroll
        for (int i = 0; i < kOctet; ++i) dot = __fmaf_rn(gs[i] * dys[i], xs[i], dot);
      }
      const float r = device::inverse_rms(device::fold<kLanes>(squares), p.n, p.eps);
      const float factor = r * r * r / static_cast<float>(p.n) * device::fold<kLanes>(dot);
      if (n == 0) continue;
      const auto offset = p.map.offsets(row0 + batch * p.batch + s);
      const RowSums known{r, factor, offset[2], offset[3]};
      if (lane == 0) sums[s] = known;
      for (int64_t c = lane * kOctet; !kWide && c < n; c += kLanes * kOctet) {
        store_dx(known, c, load_octet<kVector>(x + c, n - c), load_octet<kVector>(dy + c, n - c),
                 load_octet<kVector>(g + c, n - c));
      }
    }
  }
  // The batch's part of the weight's gradient, and dx if that is not there yet.
  __device__ void finish_columns(int batch) const {
    const T* x = buffer(batch);
    const int count = rows_of(batch);
    if constexpr (kWide) {
      for (int64_t c = threadIdx.x * kOctet; c < p.n; c += kThreads * kOctet) {
        const Octet<T> g = load_octet<true>(static_cast<const T*>(p.weight) + c, p.n - c);
        Octet<float> sum = load_octet<true>(dg + c, p.n - c);
        float v[kOctet];
#pragma unroll
        for (int i = 0; i < kOctet; ++i) v[i] = sum[i];
#pragma unroll 4
        for (int s = 0; s < count; ++s) {
          const Octet<T> xs = load_octet<true>(x + 2 * s * p.pitch + c, p.n - c);
          const Octet<T> dys = load_octet<true>(x + (2 * s + 1) * p.pitch + c, p.n - c);
          const RowSums known = sums[s];
          store_dx(known, c, xs, dys, g);
#pragma unroll
          for (int i = 0; i < kOctet; ++i) v[i] = __fmaf_rn(dys[i], xs[i] * known.r, v[i]);
        }
        store_octet<true>(dg + c, round_octet<float>(v), p.n - c);
      }
    } else {
      for (int64_t c = threadIdx.x; c < p.n; c += kThreads) {
        float sum = dg[c];
#pragma unroll 8
        for (int s = 0; s < count; ++s) {
          const float xs = x[2 * s * p.pitch + c], dys = x[(2 * s + 1) * p.pitch + c];
          sum = __fmaf_rn(dys, xs * sums[s].r, sum);
        }
        dg[c] = sum;
      }
    }
  }
};

template <class T, bool kVector, int kLanes, bool kWide>
__global__ void __launch_bounds__(kThreads, kWide ? 1 : 3)
    norm_backward_rows(const __grid_constant__ Params p) {
  extern __shared__ uint4 memory[];
  __shared__ RowSums sums[kNormBlockRows];
  T* staged = reinterpret_cast<T*>(memory);
  float* dg = reinterpret_cast<float*>(staged + p.stages * p.batch * 2 * p.pitch);
  const int64_t row0 = blockIdx.x * kNormBlockRows;
  const Block<T, kVector, kLanes, kWide> block{p,    staged, dg,
                                               sums, row0,   min(kNormBlockRows, p.rows - row0)};
  for (int64_t c = threadIdx.x; c < p.n; c += kThreads) dg[c] = 0;
  const int batches = int((block.rows + p.batch - 1) / p.batch);
  block.stage(0);
  for (int b = 0; b < batches; ++b) {
    const bool ahead = p.stages == 2 && b + 1 < batches;
    if (ahead) {
      block.stage(b + 1);
      asm volatile("cp.async.wait_group 1;" ::: "memory");
    } else {
      asm volatile("cp.async.wait_group 0;" ::: "memory");
    }
    __syncthreads();  // all of the batch is there
    block.sum_rows(b);
    __syncthreads();  // all sums are there
    block.finish_columns(b);
    __syncthreads();  // all have read them
    if (!ahead && b + 1 < batches) block.stage(b + 1);
  }
  for (int64_t c = threadIdx.x; c < p.n; c += kThreads) p.partial[blockIdx.x * p.n + c] = dg[c];
}

template <class T, bool kVector, int kLanes, bool kWide = false>
void launch_blocks(Params p, const Stream& stream) {
  constexpr int64_t kStage = 90 << 10;  // bytes of a batch
  const int64_t most = gpu_properties(stream.device().index).shared_block -
                       kNormBlockRows * int64_t{sizeof(RowSums)};
  const int64_t bytes = 2 * p.pitch * int64_t{sizeof(T)}, other = 4 * p.n;
  const int64_t fit = std::clamp<int64_t>(kStage / bytes, 1, kNormBlockRows);
  p.batch = static_cast<int>(fit >= 8 ? fit / 8 * 8 : fit);
  p.stages = p.batch < kNormBlockRows && 2 * p.batch * bytes + other <= most ? 2 : 1;
  const int64_t shared = p.stages * p.batch * bytes + other;
  if (shared > most) {
    fail(ErrorKind::kUnsupported,
         "norm_backward: rows of {} elements need {} bytes of shared memory, the GPU has {}", p.n,
         shared, most);
  }
  launch("norm_backward", norm_backward_rows<T, kVector, kLanes, kWide>,
         {norm_blocks(p.rows), kThreads, shared}, stream, p);
}

template <class T>
void launch_backward(const NormBackwardArgs& a, const Params& p, const Stream& stream) {
  if (!octets_fit({&a.x, &a.dy, &a.addend, &a.dx, &a.weight_D})) {
    launch_blocks<T, false, 32>(p, stream);
  } else if (p.n <= 8 * kOctet) {
    launch_blocks<T, true, 8>(p, stream);
  } else if (p.n <= 16 * kOctet) {
    launch_blocks<T, true, 16>(p, stream);
  } else if (p.n < kThreads / 2 * kOctet) {
    launch_blocks<T, true, 32>(p, stream);
  } else {
    launch_blocks<T, true, 32, true>(p, stream);
  }
}

// ---- the sum over blocks of rows

constexpr int kTileRows = 64, kAhead = 3;

// A block has 32 columns: all its warps bring tiles, the first one adds them up, one after the
// other.
__global__ void __launch_bounds__(kThreads)
    sum_norm_blocks(const float* partial, int64_t blocks, int64_t n, float* grad, bool accumulate) {
  __shared__ float tiles[kAhead + 1][kTileRows][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t c = int64_t{blockIdx.x} * 32 + lane;
  const auto bring = [&](int64_t tile) {
    for (int i = warp; i < kTileRows; i += kThreads / 32) {
      const int64_t b = tile * kTileRows + i;
      if (b >= blocks || c >= n) continue;
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(
                       uint32_t(__cvta_generic_to_shared(&tiles[tile % (kAhead + 1)][i][lane]))),
                   "l"(partial + b * n + c)
                   : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  float sum = 0;
  for (int tile = 0; tile < kAhead; ++tile) bring(tile);
  for (int64_t tile = 0; tile * kTileRows < blocks; ++tile) {
    bring(tile + kAhead);
    asm volatile("cp.async.wait_group %0;" ::"n"(kAhead) : "memory");
    __syncthreads();
    if (warp == 0) {
      const int64_t rows = min(int64_t{kTileRows}, blocks - tile * kTileRows);
#pragma unroll 16
      for (int64_t i = 0; i < rows; ++i) sum += tiles[tile % (kAhead + 1)][i][lane];
    }
    __syncthreads();
  }
  if (warp == 0 && c < n) grad[c] = accumulate ? grad[c] + sum : sum;
}

void launch_sum(const NormBackwardArgs& a, const Stream& stream) {
  const int64_t n = a.grad_D.size(0);
  launch("norm_backward", sum_norm_blocks, {blocks_for(n, 32), kThreads}, stream,
         a.workspace.data<float>(), a.workspace.size(0), n, a.grad_D.data<float>(), a.accumulate);
}

}  // namespace

void norm_backward_cuda(const NormBackwardArgs& a, const Stream& stream) {
  const Params p{a.x.raw(),
                 a.weight_D.raw(),
                 a.dy.raw(),
                 a.addend.raw(),
                 a.dx.raw(),
                 a.workspace.data<float>(),
                 RowMap<4>({&a.x, &a.dy, &a.addend, &a.dx}),
                 row_count(a.x),
                 a.x.size(-1),
                 a.eps,
                 blocks_for(a.x.size(-1), kOctet) * kOctet};
  with_storage(a.x.dtype(),
               [&](auto element) { launch_backward<decltype(element)>(a, p, stream); });
  launch_sum(a, stream);
}

}  // namespace moiety::model
