// bf16 tiles through mma.sync. Operands come by cp.async through a ring of stages in shared memory;
// those of a block's next tile come while it stores the last one. 16-byte pieces of a stage lie
// where ldmatrix reads eight of them from all banks.
#include <array>
#include <utility>

#include "moiety/gemm/mma_device.cuh"
#include "moiety/gemm/tile_gemm_device.cuh"
#include "moiety/gemm/tile_launch.cuh"

namespace moiety::gemm {
namespace {

using namespace device;
using namespace moiety::device;

constexpr int kDepth = 64;  // elements of the reduction in a stage
constexpr int kPiece = 8;   // elements that are 16 bytes

template <GemmOp kOperation, bool kScales>
struct Config {
  static constexpr GemmOp kOp = kOperation;
  static constexpr bool kScaled = kScales;
  // Block scales need a second set of accumulators.
  static constexpr int kRows = 128, kColumns = 128;
  static constexpr int kWarpRows = 64, kWarpColumns = kScaled ? 32 : 64;
  static constexpr int kThreads = 32 * (kRows / kWarpRows) * (kColumns / kWarpColumns);
  static constexpr int kStages = kScaled ? 4 : 3;
  static constexpr int kBlocks = kScaled ? 1 : 2;  // blocks per multiprocessor
  // Whether an operand's rows hold the reduction; otherwise its rows are the reduction.
  static constexpr bool kDeepA = kOp != GemmOp::kNT, kDeepB = kOp == GemmOp::kTN;
  static constexpr int kPiecesA = (kDeepA ? kDepth : kRows) / kPiece;  // pieces of a row of a stage
  static constexpr int kPiecesB = (kDeepB ? kDepth : kColumns) / kPiece;
  static constexpr int kBytesA = kRows * kDepth * 2, kBytesB = kColumns * kDepth * 2;
  static constexpr int kBytes = kBytesA + kBytesB;
  static constexpr int kBlocksM = kWarpRows / 16, kBlocksN = kWarpColumns / 8;
};

// Moves a piece of a row that may lie at any address.
__device__ void move_piece(uint32_t to, const uint16_t* row, int64_t column, int bytes) {
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

// The bytes of the piece at `column` that exist.
__device__ int piece_bytes(int64_t columns, int64_t column) {
  return static_cast<int>(2 * min(max(columns - column, int64_t{0}), int64_t{kPiece}));
}

// Loads the parts of an operand that belong to stages: kRows rows of kDepth elements, or kDepth
// rows of kRows. A thread has the same piece of some rows.
template <int kRows, bool kDeep, int kThreads>
class StageLoader {
 public:
  __device__ void begin(const TileRows<uint16_t>& x) {
    plain_ = x.aligned && !x.source;
    row_ = threadIdx.x / kPieces;
    piece_ = threadIdx.x % kPieces;
    to_ = piece_offset<kPieces>(row_, piece_);
    from_ = x.data + row_ * x.stride + piece_ * kPiece;
    stride_ = x.stride;
    rows_ = x.rows;
    columns_ = x.columns;
  }
  // Loads a stage; rows() finds the operand's rows where they are not in order or not aligned.
  template <class Rows>
  __device__ void load(uint32_t stage, int64_t depth, Rows&& rows) const {
    if (!plain_) return load_any(stage, depth, rows());
    const int bytes = piece_bytes(columns_, (kDeep ? depth : 0) + piece_ * kPiece);
    const int64_t live = rows_ - row_ - (kDeep ? 0 : depth);
    const uint16_t* from = from_ + (kDeep ? depth : depth * stride_);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      copy_piece(stage + to_ + n * kStep * kPieces * 16, from, n * kStep < live ? bytes : 0);
      from += kStep * stride_;
    }
  }

 private:
  static constexpr int kPieces = (kDeep ? kDepth : kRows) / kPiece;
  // rows from one of the thread's pieces to the next
  static constexpr int kStep = kThreads / kPieces;
  static constexpr int kCount = kRows * kDepth / kPiece / kThreads;
  static_assert(kStep % 8 == 0);  // so that the pieces lie alike in a stage

  __device__ void load_any(uint32_t stage, int64_t depth, const TileRows<uint16_t>& x) const {
    const int64_t column = (kDeep ? depth : 0) + piece_ * kPiece;
#pragma unroll 1
    for (int n = 0; n < kCount; ++n) {
      const uint16_t* row = x.row(row_ + n * kStep + (kDeep ? 0 : depth));
      const int bytes = row ? piece_bytes(x.columns, column) : 0;
      const uint32_t to = stage + to_ + n * kStep * kPieces * 16;
      if (x.aligned) {
        copy_piece(to, bytes ? row + column : x.data, bytes);
      } else {
        move_piece(to, row, column, bytes);
      }
    }
  }

  const uint16_t* from_;
  int64_t stride_, rows_, columns_;
  uint32_t to_;
  int row_, piece_;
  bool plain_;
};

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

  // Calls visit(row, column, i, e) for every row of this thread, counted from the tile's corner:
  // its columns are `column` + 8 j and the next, v[i][j][e] and [e + 1].
  template <class Visit>
  __device__ static void visit_rows(int warp_row, int warp_column, Visit&& visit) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < C::kBlocksM; ++i) {
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        visit(warp_row + 16 * i + 4 * e + lane / 4, warp_column + lane % 4 * 2, i, e);
      }
    }
  }
};

template <class C>
__device__ void store_tile(const TileGemm& g, const Tile& t, const Accumulators<C>& acc,
                           int warp_row, int warp_column) {
  const TileEpilogue epilogue(g, t, C::kColumns);
  const int lane = threadIdx.x % 32;
  // Takes as many rows at a time as there are registers for the values read of them.
#pragma unroll
  for (int i = 0; i < C::kBlocksM; ++i) {
    float2 v[2][C::kBlocksN];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int j = 0; j < C::kBlocksN; ++j) v[r][j] = {acc.v[i][j][2 * r], acc.v[i][j][2 * r + 1]};
    }
    epilogue.store([&](int r) { return t.i + warp_row + 16 * i + 8 * r + lane / 4; }, v,
                   [&](int j) { return t.j + warp_column + 8 * j + lane % 4 * 2; });
  }
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
  Accumulators<C>::visit_rows(warp_row, warp_column, [&](int r, int c, int i, int e) {
    const float a = block_scale(g.a_scales, scales.a, first + min(t.i + r, t.m - 1));
#pragma unroll
    for (int j = 0; j < C::kBlocksN; ++j) {
      float(&sum)[4] = total.v[i][j];
      const float(&v)[4] = part.v[i][j];
      sum[e] = fmaf(v[e], __fmul_rn(a, scale_b(c + 8 * j)), sum[e]);
      sum[e + 1] = fmaf(v[e + 1], __fmul_rn(a, scale_b(c + 8 * j + 1)), sum[e + 1]);
    }
  });
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, C::kBlocks)
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
  StageLoader<C::kRows, C::kDeepA, C::kThreads> a;
  StageLoader<C::kColumns, C::kDeepB, C::kThreads> b;
  const auto load = [&](int64_t step, int64_t steps) {
    if (step < steps) {
      const uint32_t to = stages + step % C::kStages * C::kBytes;
      a.load(to, step * kDepth, [&] { return left_rows<uint16_t, C::kOp>(g, t); });
      b.load(to + C::kBytesA, step * kDepth, [&] { return right_rows<uint16_t, C::kOp>(g, t); });
    }
    commit_pieces();
  };
  const auto begin = [&] {
    if (t.group < 0) return;
    a.begin(left_rows<uint16_t, C::kOp>(g, t));
    b.begin(right_rows<uint16_t, C::kOp>(g, t));
    const int64_t steps = (t.k + kDepth - 1) / kDepth;
#pragma unroll 1
    for (int step = 0; step < C::kStages - 1; ++step) load(step, steps);
    TileEpilogue(g, t, C::kColumns).template prefetch<C::kThreads>(t, C::kRows, C::kColumns);
  };
  begin();
  while (t.group >= 0) {
    const int64_t steps = (t.k + kDepth - 1) / kDepth;
    // A warp skips its rows if all of them are past the group's.
    const bool live = t.i + warp_row < t.m;
    Accumulators<C> acc;
    acc.clear();
    [[maybe_unused]] Accumulators<C> part;
    if constexpr (C::kScaled) part.clear();
#pragma unroll 1
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

template <size_t kIndex>
TileLaunch launch_of() {
  constexpr TileKernel k = kBf16TileKernels[kIndex];
  using C = Config<k.op, k.scaled>;
  return {k,           multiply_tiles<C>,      C::kRows,  C::kColumns,
          C::kThreads, C::kStages * C::kBytes, C::kBlocks};
}

template <size_t... kIndex>
std::span<const TileLaunch> launches_of(std::index_sequence<kIndex...>) {
  static const std::array table = {launch_of<kIndex>()...};
  return table;
}

}  // namespace

std::span<const TileLaunch> bf16_tile_launches() {
  return launches_of(std::make_index_sequence<kBf16TileKernels.size()>());
}

}  // namespace moiety::gemm
