// The warp group of grouped_sm90.h that fills the ring of stages.
#pragma once

#include "moiety/gemm/sm90/in_step.cuh"
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
  // Before a tile that all blocks have, after others. They wait for each other when they can begin.
  __device__ void meet() {
    if (!maps_.in_step) return;
    barrier_wait(ring_.empty(), ring_.phase ^ 1);
    if (thread_ == 0) blocks_.meet();
    __syncwarp();
  }
  // `next` is the tile after it.
  __device__ void tile(const Tile& t, const Tile& next) {
    if constexpr (kGathers) matrix_ = matrix_place(g_, maps_.matrices, t.group, 0, 0);
    if constexpr (kGathered == Gathered::kA && !kATurned) find_rows(t);
#pragma unroll 1  // by up to 1.6 % faster
    for (int step = 0; step < t.steps; ++step) {
      barrier_wait(ring_.empty(), ring_.phase ^ 1);
      if (copies()) copy_tiles(t, step);
      if constexpr (kGathers) {
        if constexpr (kGathersSums) find_sources(t, next, step);
        gather(t, step);
        arrive_with_copies(ring_.full());
      }
      ring_.next();
    }
  }
  // Announces that no tile follows.
  __device__ void end() {
    if (kGathers) wait_copies();
    barrier_wait(ring_.empty(), ring_.phase ^ 1);
    if (kGathers) barrier_arrive(ring_.full());
    if (thread_ == 0) barrier_arrive(ring_.full());
  }

 private:
  static constexpr bool kGathers = kGathered != Gathered::kNone;
  // Whether the thread asks the copy engine; rows in order have no other warp.
  __device__ bool copies() const {
    return (!kGathers || __shfl_sync(~0u, thread_ / 32, 0) == 0) && elect_one();
  }
  __device__ Place matrix_at(const Tile& t, int column, int row) const {
    if constexpr (kGathers) {
      return {column, row, matrix_.x, matrix_.y};
    } else {
      return matrix_place(g_, maps_.matrices, t.group, column, row);
    }
  }

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
    if constexpr (L::kInPairs) {
      load_halves<kOp>(ring_, maps_.b, t.shared, [&](int half, int j) {
        return kOp == GemmOp::kTN ? matrix_at(t, k, t.column + half * (kColumns / 2))
                                  : matrix_at(t, t.column + j, k + half * (kDepth / 2));
      });
    } else if constexpr (kOp == GemmOp::kTN) {
      load_tile(ring_.b(), maps_.b, ring_.full(), matrix_at(t, k, t.column));
    } else {
      for (int j = 0; j < kColumns; j += 64) {
        load_tile(ring_.b() + j / 64 * kPiece, maps_.b, ring_.full(),
                  kOp == GemmOp::kNT ? ragged_place(t.column + j, t.begin + k, max(t.depth - k, 0))
                                     : matrix_at(t, t.column + j, k));
      }
    }
  }

  // ---- Gathered rows: a thread copies pieces of 16 bytes at one place of rows kApart apart.
  static constexpr int kApart = L::kLoaders / 8;
  static constexpr int kRows = kOp == GemmOp::kNT ? kDepth : L::kTileM;
  static constexpr int kRowsEach = (kRows + kApart - 1) / kApart;
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
  // An index becomes the place of its row, in units of 16 bytes, or a row of zeros.
  static constexpr uint32_t kZeros = ~0u;
  static constexpr bool kGathersSums = kGathers && kOp == GemmOp::kNT;
  static constexpr int kRowsOfWarp = 4 * kRowsEach, kSteps = 32 / kRowsOfWarp;
  __device__ int32_t sources_of(const Tile& t, int step) const {
    const int lane = thread_ % 32, mine = lane % kRowsOfWarp;
    const int row =
        (step + lane / kRowsOfWarp) * kDepth + thread_ / 32 * 4 + mine % 4 + mine / 4 * kApart;
    return t.group >= 0 && row < t.depth ? gathered().source[t.begin + row] : -1;
  }
  __device__ uint32_t place_of(int32_t source) const {
    if (source < 0 || source >= gathered().sources) return kZeros;
    return source * static_cast<uint32_t>(gathered().stride / 8);
  }
  __device__ void find_sources(const Tile& t, const Tile& next, int step) {
    if (step % kSteps == 0) {
      batch_ = place_of(ahead_);
      live_ = __ballot_sync(~0u, batch_ != kZeros);
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
    if constexpr (kGathersSums) return gather_sums(t, step);
    const int bytes = piece_bytes(static_cast<int>(g_.k) - step * kDepth - piece() * 8);
    const uint32_t to = ring_.a() + offset();
#pragma unroll
    for (int i = 0; i < kRowsEach; ++i) {
      if (kRows % kApart != 0 && first_row() + i * kApart >= kRows) break;
      copy_16(to + i * kApart * 128, rows_[i].data, rows_[i].live ? bytes : 0);
      rows_[i].data += kDepth * 2;
    }
  }
  // A step's rows of the reduction, all columns of the tile, with few instructions where all of the
  // warp's copies are whole: the size of one that may be shorter takes six.
  __device__ void gather_sums(const Tile& t, int step) {
    constexpr bool kIsA = kGathered == Gathered::kA;
    constexpr int kWidth = kIsA ? L::kTileM : kColumns;
    constexpr uint32_t kAll = kRowsOfWarp < 32 ? (1u << kRowsOfWarp % 32) - 1 : ~0u;
    const int column = (kIsA ? t.row : t.column) + piece() * 8;
    const int left = static_cast<int>(kIsA ? g_.m : g_.n) - column;
    const uint32_t to = (kIsA ? ring_.a() : ring_.b()) + offset();
    const char* data = static_cast<const char*>(gathered().data) + column * 2;
    const bool all_live = (live_ >> step % kSteps * kRowsOfWarp & kAll) == kAll;
    if (all_live && left >= kWidth - piece() * 8) {
      gather_whole_sums<kWidth>(to, data);
    } else {
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i) {
        const bool live = sources_[i] != kZeros;
        const char* row = data + (live ? sources_[i] : 0) * uint64_t{16};
#pragma unroll
        for (int j = 0; j < kWidth; j += 64) {
          copy_16(to + j / 64 * kPiece + i * kApart * 128, row + j * 2,
                  live ? piece_bytes(left - j) : 0);
        }
      }
    }
  }
  template <int kWidth, int i = 0, int j = 0>
  __device__ void gather_whole_sums(uint32_t to, const char* data) const {
    copy_whole_16<j / 64 * kPiece + i * kApart * 128, j * 2>(to, data + sources_[i] * uint64_t{16});
    if constexpr (j + 64 < kWidth) {
      gather_whole_sums<kWidth, i, j + 64>(to, data);
    } else if constexpr (i + 1 < kRowsEach) {
      gather_whole_sums<kWidth, i + 1, 0>(to, data);
    }
  }

  const TileGemm& g_;
  const Maps& maps_;
  Ring<L> ring_;
  int thread_;
  BlocksInStep blocks_;
  Place matrix_;  // of the tile's group, where rows are gathered
  Row rows_[kRowsEach];
  uint32_t sources_[kRowsEach], batch_, live_;  // live_: lanes whose row of the batch is not zeros
  int32_t ahead_;
};

}  // namespace moiety::gemm::sm90
