// Which matrix a block of a quantization kernel works on, and which tile of it: a single job, one
// of many, or the rows of a group whose sizes are on the device. Tiles are 128 x 128 elements (or
// one row); a job without elements has one tile, so that somebody writes its scalars.
#pragma once

#include <cstdint>

#include "moiety/quant/quantize_group.h"
#include "moiety/quant/quantize_job.h"

namespace moiety::quant::device {

constexpr int kTile = 128;
constexpr int kThreads = 256;

// Rows and columns of a tile.
struct Tiling {
  int64_t rows = kTile, cols = kTile;
};

struct Tiles {
  int64_t rows, cols;  // how many
  MOIETY_HD int64_t count() const { return rows * cols; }
};
// 64-bit division is slow on GPUs, and seldom needed. Neither is negative.
MOIETY_HD inline int64_t quotient(int64_t a, int64_t b) {
  if ((a | b) >> 32 == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}
// `rows`: of X, or of the padded col arrays.
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
  QuantizeJob job;                 // the one, or the whole of the groups
  int64_t tiles = 0;               // kSingle, kMany; of kGroups a bound for valid groups
  // kMany: jobs, and the first tile of each with the total at the end.
  const QuantizeJob* jobs = nullptr;
  const int64_t* first_tile = nullptr;
  int64_t count = 0;
  // kGroups.
  const int64_t* count_E = nullptr;  // may be null
  const int64_t* begin_E1 = nullptr;
  uint32_t* status = nullptr;  // may be null
  int64_t experts = 0, capacity = 0;
};

// Where a block is at work.
struct Place {
  int64_t row, col;  // of the tile's first element
  bool first;        // of the job's tiles
};

__device__ inline Place place_of(int64_t tile, int64_t columns, const Tiling& tiling) {
  const int64_t r = quotient(tile, columns);
  return {r * tiling.rows, (tile - r * columns) * tiling.cols, tile == 0};
}

constexpr uint32_t kWarp = 0xFFFFFFFFu;

// Inclusive sum over the lanes.
__device__ inline int64_t warp_scan(int64_t x) {
  for (int d = 1; d < 32; d *= 2) {
    const int64_t before = __shfl_up_sync(kWarp, x, d);
    if (int(threadIdx.x % 32) >= d) x += before;
  }
  return x;
}

// What group e holds as the data says now.
__device__ inline Claim claim_of(const Source& s, int64_t e) {
  return claim(s.begin_E1[e], s.begin_E1[e + 1], s.count_E ? s.count_E + e : nullptr, s.capacity);
}

// Walks over the groups with a whole warp, thirty-two at a time: visit(e, begin, rows, column) by
// the lane of group e, where `column` is that of its col arrays; lanes past the last group have
// rows -1. A group that overlaps one before it is treated as empty; fault(e, rows, true), by lane 0
// and in ascending order, hears of it, and fault(e, rows, false) of claims that cannot be.
template <class Visit, class Fault>
__device__ void walk_groups(const Source& s, Visit&& visit, Fault&& fault) {
  const int lane = threadIdx.x % 32;
  int64_t column = 0, live_end = 0;  // of the groups so far
  for (int64_t base = 0; base < s.experts; base += 32) {
    const int64_t e = base + lane;
    Claim c{0, 0, true};
    if (e < s.experts) c = claim_of(s, e);
    int64_t rows = c.valid ? c.rows : 0;
    // Claims that are all valid ascend, so they can only overlap what is before them.
    const bool odd = !c.valid || (rows > 0 && c.begin < live_end);
    if (__any_sync(kWarp, odd)) {  // group by group, as the reference does it
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

// The job whose tiles hold `tile`, by whole warps: the last one whose first tile is not past it.
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

// The job and place of a tile; false: there is no such tile. To be called by all threads of a
// block; the job of kMany and kGroups is put into `shared`, valid until the next call.
__device__ inline bool find_tile(const Source& s, int64_t tile, QuantizeJob* shared, Place* place) {
  if (s.kind == Source::Kind::kSingle) {
    if (tile >= s.tiles) return false;
    *place = place_of(tile, tiles_of(s.job.padded_rows, s.job.cols, s.tiling).cols, s.tiling);
    return true;
  }
  __shared__ int64_t found_tile;
  __syncthreads();  // the last tile's job is done with
  if (s.kind == Source::Kind::kMany) {
    if (tile >= s.tiles) return false;
    const int64_t job = job_of(s.first_tile, s.count, tile);
    const auto* from = reinterpret_cast<const uint32_t*>(s.jobs + job);
    auto* to = reinterpret_cast<uint32_t*>(shared);
    for (int i = threadIdx.x; i < int(sizeof(QuantizeJob) / 4); i += kThreads) to[i] = from[i];
    if (threadIdx.x == 0) found_tile = tile - s.first_tile[job];
    __syncthreads();
  } else {
    if (threadIdx.x == 0) found_tile = -1;
    __syncthreads();
    if (threadIdx.x < 32) {
      const int64_t columns = tiles_of(1, s.job.cols, s.tiling).cols;
      const int64_t wanted = quotient(tile, columns);
      int64_t seen = 0;  // tile rows of the groups before these thirty-two
      walk_groups(
          s,
          [&](int64_t e, int64_t begin, int64_t rows, int64_t column) {
            const int64_t mine = rows < 0 ? 0 : tiles_of(rows, 1, s.tiling).rows;
            const int64_t end = warp_scan(mine);
            const int64_t first = seen + end - mine;
            if (wanted >= first && wanted < first + mine) {
              *shared = group_job(s.job, e, begin, rows, column);
              found_tile = (wanted - first) * columns + tile - wanted * columns;
            }
            seen += __shfl_sync(kWarp, end, 31);
          },
          [](int64_t, int64_t, bool) {});
    }
    __syncthreads();
    if (found_tile < 0) return false;
  }
  *place =
      place_of(found_tile, tiles_of(shared->padded_rows, shared->cols, s.tiling).cols, s.tiling);
  return true;
}

}  // namespace moiety::quant::device
