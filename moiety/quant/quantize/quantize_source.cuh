// The matrix that a block of a quantization kernel works on, and its tile of it. The matrix is a
// single job, one of many, or the rows of a group whose sizes are on the device. Tiles are 128 x
// 128 elements (or one row); a job without elements has one tile, so that some block writes its
// scalars.
#pragma once

#include <cstdint>

#include "moiety/quant/convert/dequantize_job.h"
#include "moiety/quant/quantize/quantize_job.h"
#include "moiety/quant/quantize/quantize_memory.cuh"
#include "moiety/quant/quantize_group.h"

namespace moiety::quant::device {

constexpr int kTile = 128;
constexpr int kThreads = 256;

// Rows and columns of a tile.
struct Tiling {
  int64_t rows = kTile, cols = kTile;
};

struct Tiles {
  int64_t rows, cols;  // numbers of tiles
  MOIETY_HD int64_t count() const { return rows * cols; }
};
// Divides in 32 bits where possible: 64-bit division is slow on GPUs, and seldom needed. Neither
// argument is negative.
MOIETY_HD inline int64_t quotient(int64_t a, int64_t b) {
  if ((a | b) >> 32 == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}
// `rows` is the number of rows of X, or of the padded col arrays.
MOIETY_HD inline Tiles tiles_of(int64_t rows, int64_t cols, const Tiling& tiling) {
  const int64_t r = quotient(rows + tiling.rows - 1, tiling.rows);
  const int64_t c = quotient(cols + tiling.cols - 1, tiling.cols);
  return {r > 0 ? r : 1, c > 0 ? c : 1};
}

struct Source {
  enum class Kind : uint8_t { kSingle, kMany, kGroups };
  Kind kind = Kind::kSingle;
  Tiling tiling;
  const uint32_t* skip = nullptr;  // may be null
  QuantizeJob job;                 // the single job, or the whole of the groups
  int64_t tiles = 0;               // of kSingle and kMany; for kGroups a bound for valid groups
  int64_t run = 1;                 // for kMany and kGroups: consecutive tiles of a block, 2^n
  bool measures = false;           // a kernel of the call fills the amax slots
  bool casts = true;               // a kernel of the call writes codes
  DequantizeJob coded;             // for kernels of codes: `job.x` is where its first row would be
  // For kMany: the jobs, and the first tile of each, with the total at the end.
  const QuantizeJob* jobs = nullptr;
  const int64_t* first_tile = nullptr;
  int64_t count = 0;
  // For kGroups.
  const int64_t* count_E = nullptr;  // may be null
  const int64_t* begin_E1 = nullptr;
  uint32_t* status = nullptr;  // may be null
  int64_t experts = 0, capacity = 0;

  // Whether nothing is to be done. Even then a kernel ends after the one before it.
  __device__ bool skipped() const {
    if (!skip || *skip == 0) return false;
    cudaGridDependencySynchronize();
    return true;
  }
};

// The tile that a block works on.
struct Place {
  int64_t row, col;  // first element of the tile
  bool first;        // whether the tile is the job's first
  int slot = 0;      // slot of its job among those that are shared
};

__device__ inline Place place_of(int64_t tile, int64_t columns, const Tiling& tiling) {
  const int64_t r = quotient(tile, columns);
  return {r * tiling.rows, (tile - r * columns) * tiling.cols, tile == 0};
}

// The inclusive sum over the lanes of a warp.
__device__ inline int64_t warp_scan(int64_t x) {
  for (int d = 1; d < 32; d *= 2) {
    const int64_t before = __shfl_up_sync(kWarp, x, d);
    if (int(threadIdx.x % 32) >= d) x += before;
  }
  return x;
}

// The rows that group e claims in the present data.
__device__ inline Claim claim_of(const Source& s, int64_t e) {
  return claim(s.begin_E1[e], s.begin_E1[e + 1], s.count_E ? s.count_E + e : nullptr, s.capacity);
}

// Walks over the groups with a whole warp, thirty-two at a time. The lane of group e calls visit(e,
// begin, rows, column), where `column` is that of the group's col arrays; lanes past the last group
// have rows -1. A group that overlaps one before it is treated as empty. Lane 0 reports in
// ascending order: fault(e, rows, true) for a group that overlaps, fault(e, rows, false) for an
// impossible claim.
template <class Visit, class Fault>
__device__ void walk_groups(const Source& s, Visit&& visit, Fault&& fault) {
  const int lane = threadIdx.x % 32;
  int64_t column = 0, live_end = 0;  // totals of the groups so far
  for (int64_t base = 0; base < s.experts; base += 32) {
    const int64_t e = base + lane;
    Claim c{0, 0, true};
    if (e < s.experts) c = claim_of(s, e);
    int64_t rows = c.valid ? c.rows : 0;
    // Valid claims ascend, so they can only overlap groups before them.
    const bool odd = !c.valid || (rows > 0 && c.begin < live_end);
    if (__any_sync(kWarp, odd)) {  // group by group, as in the reference
      for (int i = 0; i < 32; ++i) {
        const int64_t begin = __shfl_sync(kWarp, c.begin, i),
                      claimed = __shfl_sync(kWarp, c.rows, i);
        const bool valid = __shfl_sync(kWarp, int(c.valid), i) != 0;
        const bool late = valid && claimed > 0 && begin < live_end;
        if ((!valid || late) && lane == 0) fault(base + i, claimed, late);
        if (late && lane == i) rows = 0;
        if (valid && claimed > 0 && !late) live_end = begin + claimed;
      }
    } else if (const uint32_t live = __ballot_sync(kWarp, rows > 0)) {
      live_end = __shfl_sync(kWarp, c.begin + rows, 31 - __clz(live));
    }
    const int64_t size = padded_group_rows(rows), end = warp_scan(size);
    visit(e, rows > 0 ? c.begin : 0, e < s.experts ? rows : -1, column + end - size);
    column += __shfl_sync(kWarp, end, 31);
  }
}

// The job whose tiles hold `tile`: the last one whose first tile is not past it. Whole warps call
// it.
__device__ inline int64_t job_of(const int64_t* first_tile, int64_t count, int64_t tile) {
  int64_t low = 0;
  while (count > 1) {
    const int64_t step = (count + 31) / 32, probe = threadIdx.x % 32 * step;
    const bool before = probe < count && first_tile[low + probe] <= tile;
    const int64_t skipped = (__popc(__ballot_sync(kWarp, before)) - 1) * step;
    low += skipped;
    count = min(step, count - skipped);
  }
  return low;
}

// The search for the group of a tile. It writes the group's job to `job` and its tiles to `range`,
// which is {0, 0} if no group has the tile. All threads of a block call it.
class GroupSearch {
 public:
  __device__ GroupSearch(const Source& s, int64_t tile, QuantizeJob* job, int64_t* range)
      : s_(s),
        columns_(tiles_of(1, s.job.cols, s.tiling).cols),
        wanted_(quotient(tile, columns_)),
        job_(job),
        range_(range) {}

  // Takes as many groups at a time as there are threads, one per thread. Claims that are all valid
  // ascend and do not overlap.
  __device__ void run() const {
    if (threadIdx.x == 0) range_[0] = range_[1] = 0;
    __shared__ int64_t sums[kThreads / 32][2];
    int64_t seen = 0, column = 0;  // tile rows and columns of the groups so far
    for (int64_t base = 0; base < s_.experts && seen <= wanted_; base += kThreads) {
      const int64_t e = base + threadIdx.x;
      Claim c{0, 0, true};
      if (e < s_.experts) c = claim_of(s_, e);
      if (__syncthreads_or(!c.valid)) return run_warp();
      const int64_t mine = e < s_.experts ? tiles_of(c.rows, 1, s_.tiling).rows : 0;
      const int64_t size = padded_group_rows(c.rows);
      int64_t first = warp_scan(mine), begin = warp_scan(size);
      if (threadIdx.x % 32 == 31) {
        sums[threadIdx.x / 32][0] = first;
        sums[threadIdx.x / 32][1] = begin;
      }
      first += seen - mine;
      begin += column - size;
      __syncthreads();
      for (int w = 0; w < kThreads / 32; ++w) {
        if (w < int(threadIdx.x / 32)) {
          first += sums[w][0];
          begin += sums[w][1];
        }
        seen += sums[w][0];
        column += sums[w][1];
      }
      visit(e, c.rows > 0 ? c.begin : 0, c.rows, begin, first, mine);
    }
  }

 private:
  // The search where some claim is not valid.
  __device__ void run_warp() const {
    if (threadIdx.x >= 32) return;
    int64_t seen = 0;
    walk_groups(
        s_,
        [&](int64_t e, int64_t begin, int64_t rows, int64_t column) {
          const int64_t mine = rows < 0 ? 0 : tiles_of(rows, 1, s_.tiling).rows;
          const int64_t end = seen + warp_scan(mine);
          visit(e, begin, rows, column, end - mine, mine);
          seen = __shfl_sync(kWarp, end, 31);
        },
        [](int64_t, int64_t, bool) {});
  }
  // Looks at group e, which has `count` tile rows from `first` on. The thread of the group calls
  // it.
  __device__ void visit(int64_t e, int64_t begin, int64_t rows, int64_t column, int64_t first,
                        int64_t count) const {
    if (wanted_ < first || wanted_ >= first + count) return;
    *job_ = group_job(s_.job, e, begin, rows, column);
    range_[0] = first * columns_;
    range_[1] = (first + count) * columns_;
  }

  const Source& s_;
  int64_t columns_, wanted_;
  QuantizeJob* job_;
  int64_t* range_;
};

// The i-th tile of a block.
__device__ inline int64_t block_tile(const Source& s, int i) {
  const int within = i & (int(s.run) - 1);
  return blockIdx.x * s.run + int64_t{gridDim.x} * (i - within) + within;
}

// Finds the job and place of a tile; false if there is no such tile. All threads of a block call
// it, for the block's tiles in order, and each time with the place of the last one. The job of
// kMany and kGroups is put into `shared`, which has kSlots, in another slot each time: so the
// kSlots - 1 jobs before it are still valid, at the next barrier too.
template <int kSlots = 1>
__device__ bool find_tile(const Source& s, int64_t tile, QuantizeJob* shared, Place* place) {
  if (s.kind == Source::Kind::kSingle) {
    if (tile >= s.tiles) return false;
    *place = place_of(tile, tiles_of(1, s.job.cols, s.tiling).cols, s.tiling);
    return true;
  }
  int slot = place->slot;
  __shared__ int64_t range[2];  // tiles of the job in `shared`, from the second call on
  if (tile == blockIdx.x * s.run || tile < range[0] || tile >= range[1]) {
    __syncthreads();  // all threads are done with the last tile's job
    slot = (slot + 1) % kSlots;
    if (s.kind == Source::Kind::kGroups) {
      GroupSearch(s, tile, shared + slot, range).run();
    } else {
      if (tile >= s.tiles) return false;
      const int64_t i = job_of(s.first_tile, s.count, tile);
      const auto* from = reinterpret_cast<const uint32_t*>(s.jobs + i);
      auto* to = reinterpret_cast<uint32_t*>(shared + slot);
      for (int w = threadIdx.x; w < int(sizeof(QuantizeJob) / 4); w += kThreads) to[w] = from[w];
      if (threadIdx.x < 2) range[threadIdx.x] = s.first_tile[i + threadIdx.x];
    }
    __syncthreads();
    if (tile >= range[1]) return false;
  }
  *place = place_of(tile - range[0], tiles_of(1, shared[slot].cols, s.tiling).cols, s.tiling);
  place->slot = slot;
  return true;
}

}  // namespace moiety::quant::device
