// bf16 tiles through mma.sync: operands come by cp.async through a ring of stages in shared memory,
// and those of a block's next tile while it stores the last. 16-byte pieces of a stage lie where
// ldmatrix reads eight of them from all banks.
#include <algorithm>

#include "moiety/base/launch.cuh"
#include "moiety/gemm/mma_device.cuh"
#include "moiety/gemm/tile_gemm_device.cuh"

namespace moiety::gemm {
namespace {

using namespace device;
using namespace moiety::device;

constexpr int kDepth = 64;  // of the reduction, a stage
constexpr int kPiece = 8;   // elements that are 16 bytes

template <GemmOp kOperation, bool kScales>
struct Config {
  static constexpr GemmOp kOp = kOperation;
  static constexpr bool kScaled = kScales;
  // Block scales need a second set of accumulators.
  static constexpr int kRows = 128, kColumns = kScaled ? 128 : 256;
  static constexpr int kWarpRows = 64, kWarpColumns = kScaled ? 32 : 64;
  static constexpr int kThreads = 32 * (kRows / kWarpRows) * (kColumns / kWarpColumns);
  static constexpr int kStages = 4;
  // Whether an operand's rows hold the reduction, else its rows are the reduction.
  static constexpr bool kDeepA = kOp != GemmOp::kNT, kDeepB = kOp == GemmOp::kTN;
  static constexpr int kPiecesA = (kDeepA ? kDepth : kRows) / kPiece;  // of a row of a stage
  static constexpr int kPiecesB = (kDeepB ? kDepth : kColumns) / kPiece;
  static constexpr int kBytesA = kRows * kDepth * 2, kBytesB = kColumns * kDepth * 2;
  static constexpr int kBytes = kBytesA + kBytesB;
  static constexpr int kBlocksM = kWarpRows / 16, kBlocksN = kWarpColumns / 8;
};

__device__ void load_piece(uint32_t to, const uint16_t* row, int64_t column, int64_t columns,
                           bool aligned, const void* somewhere) {
  const int bytes =
      row ? static_cast<int>(2 * min(max(columns - column, int64_t{0}), int64_t{8})) : 0;
  if (aligned) {
    return copy_piece(to, bytes ? row + column : somewhere, bytes);
  }
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = 4 * i < bytes ? row[column + 2 * i] : 0;
    const uint32_t high = 4 * i + 2 < bytes ? row[column + 2 * i + 1] : 0;
    word[i] = low | high << 16;
  }
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(word[0]), "r"(word[1]),
               "r"(word[2]), "r"(word[3]));
}

// The part of an operand that belongs to a stage: kRows rows of kDepth elements, or kDepth rows of
// kRows.
template <int kRows, bool kDeep, int kThreads>
__device__ void load_stage(uint32_t to, const TileRows<uint16_t>& x, int64_t depth) {
  constexpr int kPieces = (kDeep ? kDepth : kRows) / kPiece;
  constexpr int kCount = kRows * kDepth / kPiece / kThreads;
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    const int index = threadIdx.x + n * kThreads, row = index / kPieces, piece = index % kPieces;
    const int64_t r = kDeep ? row : depth + row, c = (kDeep ? depth : 0) + piece * kPiece;
    load_piece(to + piece_offset<kPieces>(row, piece), x.row(r), c, x.columns, x.aligned, x.data);
  }
}

template <class C>
struct Accumulators {
  float v[C::kBlocksM][C::kBlocksN][4];

  __device__ void clear() {
#pragma unroll
    for (auto& row : v) {
#pragma unroll
      for (auto& block : row) {
#pragma unroll
        for (float& x : block) x = 0;
      }
    }
  }

  __device__ void add_stage(uint32_t stage, int warp_row, int warp_column) {
#pragma unroll
    for (int depth = 0; depth < kDepth; depth += 16) {
      uint32_t a[C::kBlocksM][4], b[C::kBlocksN / 2][4];
#pragma unroll
      for (int i = 0; i < C::kBlocksM; ++i) {
        const int row = warp_row + 16 * i;
        if constexpr (C::kDeepA) {
          load_left<C::kPiecesA>(a[i], stage, row, depth);
        } else {
          load_left_turned<C::kPiecesA>(a[i], stage, row, depth);
        }
      }
#pragma unroll
      for (int j = 0; j < C::kBlocksN / 2; ++j) {
        const int column = warp_column + 16 * j;
        if constexpr (C::kDeepB) {
          load_right<C::kPiecesB>(b[j], stage + C::kBytesA, column, depth);
        } else {
          load_right_turned<C::kPiecesB>(b[j], stage + C::kBytesA, column, depth);
        }
      }
#pragma unroll
      for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
        for (int j = 0; j < C::kBlocksN; ++j) {
          multiply(v[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }

  // visit(row, column, block, e) of every pair of elements that this thread holds: columns
  // `column` and `column + 1`, v[block][e] and [e + 1]; from the tile's corner.
  template <class Visit>
  __device__ static void visit_pairs(int warp_row, int warp_column, Visit&& visit) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        const int row = warp_row + 16 * i + 4 * e + lane / 4;
#pragma unroll
        for (int j = 0; j < C::kBlocksN; ++j) {
          visit(row, warp_column + 8 * j + lane % 4 * 2, i, j, e);
        }
      }
    }
  }
};

template <class C>
__device__ void store_tile(const TileGemm& g, const Tile& t, const Accumulators<C>& acc,
                           int warp_row, int warp_column) {
  const TileEpilogue epilogue(g, t);
  const bool pairs = epilogue.in_pairs();
  Accumulators<C>::visit_pairs(warp_row, warp_column, [&](int r, int c, int i, int j, int e) {
    const int64_t row = t.i + r, column = t.j + c;
    if (row >= t.m || column >= g.n) return;
    const float v = epilogue.value(row, column, acc.v[i][j][e]);
    if (column + 1 >= g.n) return epilogue.store(row, column, v);
    const float next = epilogue.value(row, column + 1, acc.v[i][j][e + 1]);
    if (pairs) return epilogue.store_pair(row, column, v, next);
    epilogue.store(row, column, v);
    epilogue.store(row, column + 1, next);
  });
}

// total = fma(part, round(a scale * b scale), total).
template <class C>
__device__ void add_scaled(const TileGemm& g, const Tile& t, int64_t slice,
                           const Accumulators<C>& part, Accumulators<C>& total, int warp_row,
                           int warp_column) {
  const SliceScales scales(g, t, slice);
  const int64_t first = g.ragged == Ragged::kRows ? t.begin : 0;
  const auto scale_b = [&](int64_t column) {
    return block_scale(g.b_scales, scales.b, min(t.j + column, g.n - 1));
  };
  Accumulators<C>::visit_pairs(warp_row, warp_column, [&](int r, int c, int i, int j, int e) {
    const float a = block_scale(g.a_scales, scales.a, first + min(t.i + r, t.m - 1));
    float(&sum)[4] = total.v[i][j];
    const float(&v)[4] = part.v[i][j];
    sum[e] = fmaf(v[e], __fmul_rn(a, scale_b(c)), sum[e]);
    sum[e + 1] = fmaf(v[e + 1], __fmul_rn(a, scale_b(c + 1)), sum[e + 1]);
  });
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    multiply_tiles(const __grid_constant__ TileGemm g) {
  extern __shared__ __align__(128) uint8_t shared[];
  const auto stages = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  constexpr int kWarpsN = C::kColumns / C::kWarpColumns;
  const int warp = threadIdx.x / 32;
  const int warp_row = warp / kWarpsN * C::kWarpRows;
  const int warp_column = warp % kWarpsN * C::kWarpColumns;

  TileWalk<C::kRows, C::kColumns> walk(g);
  int64_t index = blockIdx.x;
  Tile t = walk.at(index);
  TileRows<uint16_t> a, b;
  const auto load = [&](int64_t step, int64_t steps) {
    if (step < steps) {
      const uint32_t to = stages + step % C::kStages * C::kBytes;
      load_stage<C::kRows, C::kDeepA, C::kThreads>(to, a, step * kDepth);
      load_stage<C::kColumns, C::kDeepB, C::kThreads>(to + C::kBytesA, b, step * kDepth);
    }
    commit_pieces();
  };
  const auto begin = [&] {
    if (t.group < 0) return;
    a = left_rows<uint16_t, C::kOp>(g, t);
    b = right_rows<uint16_t, C::kOp>(g, t);
    const int64_t steps = (t.k + kDepth - 1) / kDepth;
    for (int step = 0; step < C::kStages - 1; ++step) load(step, steps);
  };
  begin();
  while (t.group >= 0) {
    const int64_t steps = (t.k + kDepth - 1) / kDepth;
    // Rows past the group's are left out where all of a warp's are.
    const bool live = t.i + warp_row < t.m;
    Accumulators<C> acc;
    acc.clear();
    [[maybe_unused]] Accumulators<C> part;
    if constexpr (C::kScaled) part.clear();
    for (int64_t step = 0; step < steps; ++step) {
      wait_for_pieces<C::kStages - 2>();
      __syncthreads();
      load(step + C::kStages - 1, steps);
      const uint32_t stage = stages + step % C::kStages * C::kBytes;
      if (!live) continue;
      if constexpr (C::kScaled) {
        part.add_stage(stage, warp_row, warp_column);
        constexpr int kSteps = kScaledSlice / kDepth;
        if (step % kSteps == kSteps - 1 || step == steps - 1) {
          add_scaled<C>(g, t, step / kSteps, part, acc, warp_row, warp_column);
          part.clear();
        }
      } else {
        acc.add_stage(stage, warp_row, warp_column);
      }
    }
    wait_for_pieces<0>();
    __syncthreads();  // all have read the stages
    const Tile done = t;
    index += gridDim.x;
    t = walk.at(index);
    begin();
    if (live) store_tile<C>(g, done, acc, warp_row, warp_column);
  }
}

template <class C>
void launch_tiles(const TileGemm& g, const Stream& stream) {
  const int64_t tiles = tile_bound(g, C::kRows, C::kColumns);
  const int64_t processors = gpu_properties(stream.device().index).multiprocessors;
  launch("gemm tiles", multiply_tiles<C>,
         {std::min(tiles, processors), C::kThreads, C::kStages * C::kBytes}, stream, g);
}

template <GemmOp kOp>
void launch_op(const TileGemm& g, const Stream& stream) {
  if constexpr (kOp != GemmOp::kNT) {
    if (g.a_scales.data) return launch_tiles<Config<kOp, true>>(g, stream);
  }
  launch_tiles<Config<kOp, false>>(g, stream);
}

}  // namespace

void tile_gemm_bf16_cuda(const TileGemm& g, const Stream& stream) {
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
