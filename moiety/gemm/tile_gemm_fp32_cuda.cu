// fp32 tiles in the order of the reference: a chain of fma for each element. A thread has 8 x 8
// elements; operands lie in shared memory by rows of the reduction, and the next ones are on their
// way meanwhile.
#include <algorithm>

#include "moiety/base/launch.cuh"
#include "moiety/gemm/tile_gemm_device.cuh"

namespace moiety::gemm {
namespace {

using namespace device;

constexpr int kRows = 128, kColumns = 64, kDepth = 16;
constexpr int kThreads = 128;

// The part of an operand for kDepth elements of the reduction, on its way to shared memory.
// kDeep: rows hold the reduction, else they are it.
template <int kWidth, bool kDeep>
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

// A thread's elements are 4 + 4 rows and 4 + 4 columns, each half of the tile apart.
__device__ int own(int part, int i, int size) { return i / 4 * (size / 2) + part * 4 + i % 4; }

template <class Visit>
__device__ void visit_own(Visit&& visit) {
  const int part_row = threadIdx.x / 8, part_column = threadIdx.x % 8;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      visit(own(part_row, i, kRows), own(part_column, j, kColumns), i, j);
    }
  }
}

__device__ void read8(float (&out)[8], const float* row, int part, int size) {
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    const float4 x = *reinterpret_cast<const float4*>(row + own(part, i, size));
    out[i] = x.x;
    out[i + 1] = x.y;
    out[i + 2] = x.z;
    out[i + 3] = x.w;
  }
}

template <GemmOp kOp, bool kScaled>
__device__ void multiply_tile(const TileGemm& g, const Tile& t, float (&sum)[8][8]) {
  __shared__ __align__(16) float left[2][kDepth][kRows + 4], right[2][kDepth][kColumns + 4];
  const TileRows<float> a = left_rows<float, kOp>(g, t), b = right_rows<float, kOp>(g, t);
  Piece<kRows, kOp != GemmOp::kNT> next_a;
  Piece<kColumns, kOp == GemmOp::kTN> next_b;
  float part[kScaled ? 8 : 1][8] = {};
  __syncthreads();  // the last tile's have been read
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
      if (k >= depth) break;  // a product of what is not there could turn -0 into +0
      float x[8], y[8];
      read8(x, left[at][k], threadIdx.x / 8, kRows);
      read8(y, right[at][k], threadIdx.x % 8, kColumns);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
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
      visit_own([&](int r, int c, int i, int j) {
        const float scale =
            __fmul_rn(block_scale(g.a_scales, scales.a, first + min(t.i + r, t.m - 1)),
                      block_scale(g.b_scales, scales.b, min(t.j + c, g.n - 1)));
        sum[i][j] = fmaf(part[i][j], scale, sum[i][j]);
        part[i][j] = 0;
      });
    }
  }
}

template <GemmOp kOp, bool kScaled>
__global__ void __launch_bounds__(kThreads) multiply_tiles(const __grid_constant__ TileGemm g) {
  TileWalk<kRows, kColumns> walk(g);
  for (int64_t index = blockIdx.x;; index += gridDim.x) {
    const Tile t = walk.at(index);
    if (t.group < 0) return;
    float sum[8][8] = {};
    multiply_tile<kOp, kScaled>(g, t, sum);
    const TileEpilogue epilogue(g, t);
    visit_own([&](int r, int c, int i, int j) {
      const int64_t row = t.i + r, column = t.j + c;
      if (row < t.m && column < g.n) {
        epilogue.store(row, column, epilogue.value(row, column, sum[i][j]));
      }
    });
  }
}

template <GemmOp kOp, bool kScaled>
void launch_tiles(const TileGemm& g, const Stream& stream) {
  const int64_t tiles = tile_bound(g, kRows, kColumns);
  const int64_t resident = resident_blocks(multiply_tiles<kOp, kScaled>, kThreads, 0, stream);
  launch("gemm fp32 tiles", multiply_tiles<kOp, kScaled>, {std::min(tiles, resident), kThreads},
         stream, g);
}

template <GemmOp kOp>
void launch_op(const TileGemm& g, const Stream& stream) {
  if constexpr (kOp != GemmOp::kNT) {
    if (g.a_scales.data) return launch_tiles<kOp, true>(g, stream);
  }
  launch_tiles<kOp, false>(g, stream);
}

}  // namespace

void tile_gemm_fp32_cuda(const TileGemm& g, const Stream& stream) {
  switch (g.op) {
    case GemmOp::kTN:
      return launch_op<GemmOp::kTN>(g, stream);
    case GemmOp::kNN:
      return launch_op<GemmOp::kNN>(g, stream);
    case GemmOp::kNT:
      return launch_op<GemmOp::kNT>(g, stream);
  }
}

}  // namespace moiety::gemm
