// The warp group of grouped_sm90.h that fills the ring of stages.
#pragma once

#include "moiety/gemm/sm90/stages.cuh"

namespace moiety::gemm::sm90 {

template <GemmOp kOp, int kColumns, Gathered kGathered, class L>
class Loader {
 public:
  static constexpr bool kATurned = kOp == GemmOp::kNT;

  __device__ Loader(const TileGemm& g, const Maps& maps, uint32_t base)
      : g_(g), maps_(maps), ring_{base}, thread_(threadIdx.x - kGroups * kWarpGroup) {}

  // Before the first tile.
  __device__ void begin(const Tile& t) {
    if constexpr (kGathersSums) ahead_ = sources_of(t, 0);
  }
  // `next` is the tile after it.
  __device__ void tile(const Tile& t, const Tile& next) {
    if constexpr (kGathered == Gathered::kA && !kATurned) find_rows(t);
    for (int step = 0; step < t.steps; ++step) {
      barrier_wait(ring_.empty(), ring_.phase ^ 1);
      if (thread_ == 0) copy_tiles(t, step);
      if constexpr (kGathered != Gathered::kNone) {
        if constexpr (kGathersSums) find_sources(t, next, step);
        gather(t, step);
        arrive_with_copies(ring_.full());
      }
      ring_.next();
    }
  }
  // Announces that no tile follows.
  __device__ void end() {
    if (kGathered != Gathered::kNone) wait_copies();
    barrier_wait(ring_.empty(), ring_.phase ^ 1);
    barrier_arrive(ring_.full());
    if (kGathered != Gathered::kNone && thread_ == 0) barrier_arrive(ring_.full());
  }

 private:
  // The operands that the copy engine brings.
  __device__ void copy_tiles(const Tile& t, int step) {
    constexpr bool kCopyA = kGathered != Gathered::kA, kCopyB = kGathered != Gathered::kB;
    barrier_arrive_expecting(ring_.full(), (kCopyA ? L::kA : 0) + (kCopyB ? L::kB : 0));
    const int k = step * kDepth;
    if constexpr (kCopyA && kATurned) {
      for (int i = 0; i < L::kTileM; i += 64) {
        load_tile(ring_.a() + i / 64 * kPiece, maps_.a, ring_.full(),
                  ragged_place(t.row + i, t.begin + k, max(t.depth - k, 0)));
      }
    } else if constexpr (kCopyA) {
      load_tile(ring_.a(), maps_.a, ring_.full(), ragged_place(k, t.begin + t.row, t.live));
    }
    if constexpr (!kCopyB) return;
    if constexpr (kOp == GemmOp::kTN) {
      load_tile(ring_.b(), maps_.b, ring_.full(),
                matrix_place(g_, maps_.matrices, t.group, k, t.column));
    } else {
      for (int j = 0; j < kColumns; j += 64) {
        load_tile(ring_.b() + j / 64 * kPiece, maps_.b, ring_.full(),
                  kOp == GemmOp::kNT ? ragged_place(t.column + j, t.begin + k, max(t.depth - k, 0))
                                     : matrix_place(g_, maps_.matrices, t.group, t.column + j, k));
      }
    }
  }

  // ---- Gathered rows: a thread copies pieces of 16 bytes at one place of rows kApart apart.
  static constexpr int kApart = L::kLoaders / 8;
  static constexpr int kRowsEach = (kOp == GemmOp::kNT ? kDepth : L::kTileM) / kApart;
  __device__ const ProductOperand& gathered() const {
    return kGathered == Gathered::kA ? g_.a : g_.b;
  }
  __device__ int piece() const { return thread_ % 8; }
  __device__ int first_row() const { return thread_ / 8; }
  // The place of the thread's piece in its first row, swizzled.
  __device__ uint32_t offset() const {
    return first_row() * 128 + (piece() ^ first_row() % 8) * 16;
  }
  // The address of a row's bytes from `column` on, and whether there are any: else they are zeros,
  // nothing is read, and the address is any.
  struct Row {
    const char* data;
    bool live;
  };
  __device__ Row row_of(int32_t source, int column) const {
    const ProductOperand& x = gathered();
    const bool live = source >= 0 && source < x.sources;
    return {static_cast<const char*>(x.data) + ((live ? source * x.stride : 0) + column) * 2, live};
  }
  __device__ void find_rows(const Tile& t) {
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      const int row = first_row() + kApart * i;
      const int32_t* source = gathered().source + t.begin + t.row + row;
      rows_[i] = row_of(row < t.live ? *source : -1, piece() * 8);
    }
  }
  // Where rows are summed over, every step has its own. A warp reads the indices of its rows for
  // kSteps steps at once, as many steps before they are used: a lane has one, and shows it to those
  // that copy the row.
  static constexpr bool kGathersSums = kGathered != Gathered::kNone && kOp == GemmOp::kNT;
  static constexpr int kRowsOfWarp = 4 * kRowsEach, kSteps = 32 / kRowsOfWarp;
  __device__ int32_t sources_of(const Tile& t, int step) const {
    const int lane = thread_ % 32, mine = lane % kRowsOfWarp;
    const int row =
        (step + lane / kRowsOfWarp) * kDepth + thread_ / 32 * 4 + mine % 4 + mine / 4 * kApart;
    return t.group >= 0 && row < t.depth ? gathered().source[t.begin + row] : -1;
  }
  __device__ void find_sources(const Tile& t, const Tile& next, int step) {
    if (step % kSteps == 0) {
      batch_ = ahead_;
      ahead_ = step + kSteps < t.steps ? sources_of(t, step + kSteps) : sources_of(next, 0);
    }
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      const int lane = step % kSteps * kRowsOfWarp + 4 * i + thread_ % 32 / 8;
      sources_[i] = __shfl_sync(~0u, batch_, lane);
    }
  }
  // The bytes of a piece that begins `left` columns before the operand's end.
  __device__ static int piece_bytes(int left) { return min(max(left * 2, 0), 16); }

  __device__ void gather(const Tile& t, int step) {
    if constexpr (kOp == GemmOp::kNT) {
      constexpr bool kIsA = kGathered == Gathered::kA;
      constexpr int kWidth = kIsA ? L::kTileM : kColumns;
      const int column = (kIsA ? t.row : t.column) + piece() * 8;
      const int left = static_cast<int>(kIsA ? g_.m : g_.n) - column;
      const uint32_t to = (kIsA ? ring_.a() : ring_.b()) + offset();
      if (left >= kWidth - piece() * 8) {  // few instructions, since one warp a scheduler copies
        gather_reduction<kWidth>(to, column, [](int) { return 16; });
      } else {
        gather_reduction<kWidth>(to, column, [=](int j) { return piece_bytes(left - j); });
      }
    } else {
      const int bytes = piece_bytes(static_cast<int>(g_.k) - step * kDepth - piece() * 8);
      const uint32_t to = ring_.a() + offset();
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i) {
        copy_16(to + i * kApart * 128, rows_[i].data, rows_[i].live ? bytes : 0);
        rows_[i].data += kDepth * 2;
      }
    }
  }
  // A step's rows of the reduction, all columns of the tile. `bytes` of a piece from column j on.
  template <int kWidth, class Bytes>
  __device__ void gather_reduction(uint32_t to, int column, Bytes&& bytes) const {
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      const Row row = row_of(sources_[i], column);
#pragma unroll
      for (int j = 0; j < kWidth; j += 64) {
        copy_16(to + j / 64 * kPiece + i * kApart * 128, row.data + j * 2, row.live ? bytes(j) : 0);
      }
    }
  }

  const TileGemm& g_;
  const Maps& maps_;
  Ring<L> ring_;
  int thread_;
  Row rows_[kRowsEach];
  int32_t sources_[kRowsEach], batch_, ahead_;
};

}  // namespace moiety::gemm::sm90
