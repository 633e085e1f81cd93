// fp32 tiles in the order of the reference: a chain of fma for each element. Operands lie in shared
// memory by rows of the reduction; the next ones are loaded meanwhile.
#include <array>
#include <type_traits>
#include <utility>

#include "moiety/gemm/tile_gemm_device.cuh"
#include "moiety/gemm/tile_launch.cuh"

namespace moiety::gemm {
namespace {

using namespace device;

// A thread has kOwn x kOwn elements; kDepth is the part of the reduction in a step.
template <int kRows_, int kColumns_, int kDepth_, int kOwn_>
struct Config {
  static constexpr int kRows = kRows_, kColumns = kColumns_, kDepth = kDepth_, kOwn = kOwn_;
  static constexpr int kThreadColumns = kColumns / kOwn;
  static constexpr int kThreads = kRows / kOwn * kThreadColumns;
};
using Large = Config<kLargeFp32Rows, kLargeFp32Columns, 16, 8>;
// For products with few elements and long reductions, such as a router's weight gradient.
using Small = Config<32, 32, 64, 4>;

// The part of an operand for a step, on its way to shared memory. With kDeep rows hold the
// reduction, otherwise they are the reduction.
template <int kWidth, int kDepth, int kThreads, bool kDeep>
struct Piece {
  static constexpr int kCount = kWidth * kDepth / kThreads;
  float v[kCount];

  __device__ static int2 place(int n) {  // {width, depth}
    const int index = threadIdx.x + n * kThreads;
    return kDeep ? make_int2(index / kDepth, index % kDepth)
                 : make_int2(index % kWidth, index / kWidth);
  }
  __device__ void load(const TileRows<float>& x, int64_t depth) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const int2 p = place(n);
      const int64_t r = kDeep ? p.x : depth + p.y, c = kDeep ? depth + p.y : p.x;
      const float* row = x.row(r);
      v[n] = row && c < x.columns ? row[c] : 0;
    }
  }
  __device__ void store(float (&to)[kDepth][kWidth + 4]) const {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const int2 p = place(n);
      to[p.y][p.x] = v[n];
    }
  }
};

// A thread's rows, and columns, are runs of 4; with kOwn = 8 there are two runs, half of the tile
// apart.
__device__ int own(int part, int i, int size) { return i / 4 * (size / 2) + part * 4 + i % 4; }

template <class C, class Visit>
__device__ void visit_own(Visit&& visit) {
  const int part_row = threadIdx.x / C::kThreadColumns,
            part_column = threadIdx.x % C::kThreadColumns;
#pragma unroll
  for (int i = 0; i < C::kOwn; ++i) {
#pragma unroll
    for (int j = 0; j < C::kOwn; ++j) {
      visit(own(part_row, i, C::kRows), own(part_column, j, C::kColumns), i, j);
    }
  }
}

template <int kOwn>
__device__ void read_own(float (&out)[kOwn], const float* row, int part, int size) {
#pragma unroll
  for (int i = 0; i < kOwn; i += 4) {
    const float4 x = *reinterpret_cast<const float4*>(row + own(part, i, size));
    out[i] = x.x;
    out[i + 1] = x.y;
    out[i + 2] = x.z;
    out[i + 3] = x.w;
  }
}

template <class C, GemmOp kOp, bool kScaled>
__device__ void multiply_tile(const TileGemm& g, const Tile& t, float (&sum)[C::kOwn][C::kOwn]) {
  constexpr int kRows = C::kRows, kColumns = C::kColumns, kDepth = C::kDepth, kOwn = C::kOwn;
  __shared__ __align__(16) float left[2][kDepth][kRows + 4], right[2][kDepth][kColumns + 4];
  const TileRows<float> a = left_rows<float, kOp>(g, t), b = right_rows<float, kOp>(g, t);
  Piece<kRows, kDepth, C::kThreads, kOp != GemmOp::kNT> next_a;
  Piece<kColumns, kDepth, C::kThreads, kOp == GemmOp::kTN> next_b;
  float part[kScaled ? kOwn : 1][kOwn] = {};
  __syncthreads();  // the last tile's operands have been read
  for (int64_t step = 0; step * kDepth < t.k; ++step) {
    const int at = step % 2;
    if (step == 0) {
      next_a.load(a, 0);
      next_b.load(b, 0);
    }
    next_a.store(left[at]);
    next_b.store(right[at]);
    __syncthreads();
    next_a.load(a, (step + 1) * kDepth);
    next_b.load(b, (step + 1) * kDepth);
    const int depth = static_cast<int>(min(int64_t{kDepth}, t.k - step * kDepth));
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
      if (k >= depth) break;  // a product of elements past the end could turn -0 into +0
      float x[kOwn], y[kOwn];
      read_own(x, left[at][k], threadIdx.x / C::kThreadColumns, kRows);
      read_own(y, right[at][k], threadIdx.x % C::kThreadColumns, kColumns);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
#pragma unroll
        for (int j = 0; j < kOwn; ++j) {
          float& v = kScaled ? part[kScaled ? i : 0][j] : sum[i][j];
          v = fmaf(x[i], y[j], v);
        }
      }
    }
    if constexpr (kScaled) {
      constexpr int kSteps = kScaledSlice / kDepth;
      if (step % kSteps != kSteps - 1 && (step + 1) * kDepth < t.k) continue;
      const SliceScales scales(g, t, step / kSteps);
      const int64_t first = g.ragged == Ragged::kRows ? t.begin : 0;
      visit_own<C>([&](int r, int c, int i, int j) {
        const float scale =
            __fmul_rn(block_scale(g.a_scales, scales.a, first + min(t.i + r, t.m - 1)),
                      block_scale(g.b_scales, scales.b, min(t.j + c, g.n - 1)));
        sum[i][j] = fmaf(part[i][j], scale, sum[i][j]);
        part[i][j] = 0;
      });
    }
  }
}

template <class C, GemmOp kOp, bool kScaled>
__global__ void __launch_bounds__(C::kThreads) multiply_tiles(const __grid_constant__ TileGemm g) {
  TileWalk<C::kRows, C::kColumns> walk(g);
  for (int64_t index = blockIdx.x;; index += gridDim.x) {
    const Tile t = walk.at(index);
    if (t.group < 0) return;
    float sum[C::kOwn][C::kOwn] = {};
    multiply_tile<C, kOp, kScaled>(g, t, sum);
    const TileEpilogue epilogue(g, t, C::kColumns);
    const int part_row = threadIdx.x / C::kThreadColumns;
    const int part_column = threadIdx.x % C::kThreadColumns;
#pragma unroll
    for (int i = 0; i < C::kOwn; ++i) {
      const int64_t row = t.i + own(part_row, i, C::kRows);
      float2 v[1][C::kOwn / 2];
#pragma unroll
      for (int j = 0; j < C::kOwn; j += 2) v[0][j / 2] = {sum[i][j], sum[i][j + 1]};
      epilogue.store([&](int) { return row; }, v,
                     [&](int p) { return t.j + own(part_column, 2 * p, C::kColumns); });
    }
  }
}

template <size_t kIndex>
TileLaunch launch_of() {
  constexpr TileKernel k = kFp32TileKernels[kIndex];
  using C = std::conditional_t<k.small, Small, Large>;
  return {k, multiply_tiles<C, k.op, k.scaled>, C::kRows, C::kColumns, C::kThreads};
}

template <size_t... kIndex>
std::span<const TileLaunch> launches_of(std::index_sequence<kIndex...>) {
  static const std::array table = {launch_of<kIndex>()...};
  return table;
}

}  // namespace

std::span<const TileLaunch> fp32_tile_launches() {
  return launches_of(std::make_index_sequence<kFp32TileKernels.size()>());
}

}  // namespace moiety::gemm
