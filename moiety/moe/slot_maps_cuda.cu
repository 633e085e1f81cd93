// The maps of slots on a GPU: threads have pairs, those behind them slots without a token. And the
// rows of a routing without a group: pairs are counted in blocks, the blocks' counts are summed, and
// then every pair finds its row, so that no number depends on which thread comes first.
#include "moiety/base/launch.cuh"
#include "moiety/moe/exchange_cuda.h"

namespace moiety::moe {
namespace {

constexpr int kThreads = 256;

struct Params {
  int64_t pairs, capacity, pair_blocks;
  int topk;
  const int32_t *slot_TK, *slot_row;
  const float* w_TK;
  int32_t* source;
  float* slot_w;
};

__global__ void __launch_bounds__(kThreads) fill_maps(const __grid_constant__ Params p) {
  if (blockIdx.x < p.pair_blocks) {
    const int64_t pair = int64_t{blockIdx.x} * kThreads + threadIdx.x;
    const int32_t slot = pair < p.pairs ? p.slot_TK[pair] : -1;
    if (slot < 0) return;
    p.source[slot] = static_cast<int32_t>(pair / p.topk);
    p.slot_w[slot] = p.w_TK[pair];
    return;
  }
  const int64_t slot = (blockIdx.x - p.pair_blocks) * kThreads + threadIdx.x;
  if (slot >= p.capacity || p.slot_row[slot] >= 0) return;
  p.source[slot] = -1;
  p.slot_w[slot] = 0;
}

constexpr int kWarps = kThreads / 32;
constexpr uint32_t kAll = ~0u;
constexpr int64_t kMostExperts = 4096, kLeastPairs = 2048;

// Every block but the last has `each` pairs, at least as many as there are experts, and the last one
// fewer than twice as many. Until a block writes the rows of its pairs, the counts of its experts
// lie in their place.
struct RowsParams {
  const void* idx;
  bool wide;
  int64_t pairs, each, blocks;
  int topk, experts;
  const float* w;  // may be null
  int64_t* count;
  int32_t *source, *row;
  float* slot_w;

  __device__ int64_t first(int64_t block) const { return block * each; }
  __device__ int64_t end(int64_t block) const {
    return block + 1 == blocks ? pairs : (block + 1) * each;
  }
  __device__ int expert(int64_t pair) const {  // -1: none
    const int64_t e =
        wide ? static_cast<const int64_t*>(idx)[pair] : static_cast<const int32_t*>(idx)[pair];
    return e >= 0 && e < experts ? static_cast<int>(e) : -1;
  }
};

__global__ void __launch_bounds__(kThreads) count_pairs(const __grid_constant__ RowsParams p) {
  extern __shared__ int32_t pairs_E[];
  const int64_t b = blockIdx.x;
  for (int e = threadIdx.x; e < p.experts; e += kThreads) pairs_E[e] = 0;
  __syncthreads();
  for (int64_t i = p.first(b) + threadIdx.x; i < p.end(b); i += kThreads) {
    const int e = p.expert(i);
    if (e >= 0) atomicAdd(&pairs_E[e], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < p.experts; e += kThreads) {
    if (p.blocks == 1) {
      p.count[e] = pairs_E[e];
    } else {
      p.row[p.first(b) + e] = pairs_E[e];
    }
  }
}

// Turns the counts of blocks into the sums of those before them. A thread block has 32 experts, a
// warp a part of their blocks of pairs.
__global__ void __launch_bounds__(kThreads) sum_pairs(const __grid_constant__ RowsParams p) {
  __shared__ int32_t part[kWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t e = int64_t{blockIdx.x} * 32 + lane;
  const int64_t share = (p.blocks + kWarps - 1) / kWarps;
  const int64_t begin = min(warp * share, p.blocks);
  const int64_t end = e < p.experts ? min(begin + share, p.blocks) : begin;
  int32_t sum = 0;
#pragma unroll 8
  for (int64_t b = begin; b < end; ++b) sum += p.row[p.first(b) + e];
  part[warp][lane] = sum;
  __syncthreads();
  sum = 0;
  for (int w = 0; w < warp; ++w) sum += part[w][lane];
#pragma unroll 8
  for (int64_t b = begin; b < end; ++b) {
    int32_t& count = p.row[p.first(b) + e];
    const int32_t here = count;
    count = sum;
    sum += here;
  }
  if (warp == kWarps - 1 && e < p.experts) p.count[e] = sum;
}

// next_E[e] += the rows of the experts before e. All threads call it; returns the rows of all.
__device__ int64_t add_begins(const RowsParams& p, int32_t* next_E) {
  __shared__ int64_t sum_of_warp[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t before = 0;
  for (int base = 0; base < p.experts; base += kThreads) {
    const int e = base + static_cast<int>(threadIdx.x);
    const int64_t rows = e < p.experts ? p.count[e] : 0;
    int64_t sum = rows;
#pragma unroll
    for (int o = 1; o < 32; o *= 2) {
      const int64_t below = __shfl_up_sync(kAll, sum, o);
      if (lane >= o) sum += below;
    }
    __syncthreads();  // some threads may still read the sums of the turn before
    if (lane == 31) sum_of_warp[warp] = sum;
    __syncthreads();
    int64_t all = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w == warp) sum += before + all;
      all += sum_of_warp[w];
    }
    if (e < p.experts) next_E[e] += static_cast<int32_t>(sum - rows);
    before += all;
  }
  return before;
}

// A warp has a run of the block's pairs; lanes with the same expert find each other.
__global__ void __launch_bounds__(kThreads) number_pairs(const __grid_constant__ RowsParams p) {
  extern __shared__ int32_t next_E[];  // the row of a block's first pair, for each expert
  auto* const before_WE = reinterpret_cast<uint16_t*>(next_E + p.experts);
  const int64_t b = blockIdx.x, first = p.first(b), end = p.end(b);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int e = threadIdx.x; e < p.experts; e += kThreads) {
    next_E[e] = p.blocks == 1 ? 0 : p.row[first + e];
  }
  for (int i = threadIdx.x; i < kWarps * p.experts; i += kThreads) before_WE[i] = 0;
  const int64_t rows = add_begins(p, next_E);
  __syncthreads();  // from here on p.row belongs to the pairs
  const int64_t share = ((end - first + 31) / 32 + kWarps - 1) / kWarps * 32;
  const int64_t begin = first + warp * share, stop = min(begin + share, end);
  uint16_t* const before_E = before_WE + warp * p.experts;
  // Calls f(pair, expert or -1, lanes with the same expert).
  const auto for_pairs = [&](auto&& f) {
    for (int64_t i = begin + lane; i - lane < stop; i += 32) {
      const int e = i < stop ? p.expert(i) : -1;
      const uint32_t same = __match_any_sync(kAll, e);
      f(i, e, same);
      __syncwarp();
      if (e >= 0 && lane == __ffs(same) - 1) before_E[e] += __popc(same);
      __syncwarp();
    }
  };
  for_pairs([](int64_t, int, uint32_t) {});
  __syncthreads();
  for (int e = threadIdx.x; e < p.experts; e += kThreads) {
    int sum = 0;
    for (int w = 0; w < kWarps; ++w) {
      uint16_t& count = before_WE[w * p.experts + e];
      sum += count;
      count = static_cast<uint16_t>(sum - count);
    }
  }
  __syncthreads();
  for_pairs([&](int64_t i, int e, uint32_t same) {
    if (i >= stop) return;
    if (e < 0) {
      p.row[i] = -1;
      return;
    }
    const int32_t r = next_E[e] + before_E[e] + __popc(same & ((1u << lane) - 1));
    p.row[i] = r;
    p.source[r] = static_cast<int32_t>(i / p.topk);
    if (p.w) p.slot_w[r] = p.w[i];
  });
  // There are as many rows as pairs: this block has those behind the last one in its range.
  for (int64_t r = max(first, rows) + threadIdx.x; r < end; r += kThreads) {
    p.source[r] = -1;
    if (p.w) p.slot_w[r] = 0;
  }
}

// The rows that came, in the order of ranks and tokens, whose plan has a place for each token; a
// block numbers those of its own after it has counted the ones before. A plan that a fault has left
// unmade gives a map without meaning, whose values are places all the same.
struct RowMapParams {
  int64_t rows, tokens_max, capacity, row_blocks;
  int topk, rank, ranks;
  const int32_t *slots, *rows_RR, *slot_row;
  int32_t* source;

  __device__ bool alive(int64_t row) const {
    if (row >= rows || row % tokens_max >= rows_RR[row / tokens_max * ranks + rank]) return false;
    for (int k = 0; k < topk; ++k) {
      if (slots[row * topk + k] >= 0) return true;
    }
    return false;
  }
  __device__ bool has_row(int64_t slot) const {
    const int64_t row = slot_row[slot];
    if (row < 0 || row >= rows) return false;
    for (int k = 0; k < topk; ++k) {
      if (slots[row * topk + k] == slot) return true;
    }
    return false;
  }
};
constexpr int kRowThreads = 1024;

__global__ void __launch_bounds__(kRowThreads) number_rows(const __grid_constant__ RowMapParams p) {
  if (blockIdx.x >= p.row_blocks) {
    const int64_t slot = (blockIdx.x - p.row_blocks) * kRowThreads + threadIdx.x;
    if (slot < p.capacity && !p.has_row(slot)) p.source[slot] = -1;
    return;
  }
  __shared__ int32_t before_W[32], alive_W[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int32_t mine = 0;
#pragma unroll 4
  for (int64_t b = 0; b < blockIdx.x; ++b) mine += p.alive(b * kRowThreads + threadIdx.x);
  const int64_t row = int64_t{blockIdx.x} * kRowThreads + threadIdx.x;
  const bool alive = p.alive(row);
  const uint32_t alike = __ballot_sync(kAll, alive);
  const int32_t before = __reduce_add_sync(kAll, mine);
  if (lane == 0) {
    before_W[warp] = before;
    alive_W[warp] = __popc(alike);
  }
  __syncthreads();
  if (!alive) return;
  int32_t number = __popc(alike & ((1u << lane) - 1));
  for (int w = 0; w < 32; ++w) number += before_W[w] + (w < warp ? alive_W[w] : 0);
  for (int k = 0; k < p.topk; ++k) {
    const int32_t slot = p.slots[row * p.topk + k];
    if (slot >= 0 && slot < p.capacity && number < p.capacity) p.source[slot] = number;
  }
}

}  // namespace

void make_row_map_cuda(const EpPlan& plan, const TensorView& source_C, const Stream& stream) {
  const int64_t ranks = plan.rows_RR.size(0), rows = ranks * plan.tokens_max;
  const RowMapParams p{.rows = rows,
                       .tokens_max = plan.tokens_max,
                       .capacity = plan.capacity,
                       .row_blocks = blocks_for(rows, kRowThreads),
                       .topk = plan.topk,
                       .rank = plan.rank,
                       .ranks = static_cast<int>(ranks),
                       .slots = plan.recv_slot.data<int32_t>(),
                       .rows_RR = plan.rows_RR.data<int32_t>(),
                       .slot_row = plan.slot_row.data<int32_t>(),
                       .source = source_C.data<int32_t>()};
  launch("ep row_map", number_rows,
         {p.row_blocks + blocks_for(p.capacity, kRowThreads), kRowThreads}, stream, p);
}

void expert_rows_cuda(const ExpertRowsArgs& args, const Stream& stream) {
  const int64_t pairs = args.idx_TK.numel(), experts = args.count_E.size(0);
  if (experts > kMostExperts) {
    fail(ErrorKind::kUnsupported, "expert_rows: {} experts, at most {} on a GPU", experts,
         kMostExperts);
  }
  const int64_t each = std::max(kLeastPairs, experts);
  const RowsParams p{.idx = args.idx_TK.raw(),
                     .wide = args.idx_TK.dtype() == DType::kInt64,
                     .pairs = pairs,
                     .each = each,
                     .blocks = std::max<int64_t>(pairs / each, 1),
                     .topk = static_cast<int>(args.idx_TK.size(1)),
                     .experts = static_cast<int>(experts),
                     .w = args.w_TK.data<float>(),
                     .count = args.count_E.data<int64_t>(),
                     .source = args.source_R.data<int32_t>(),
                     .row = args.row_TK.data<int32_t>(),
                     .slot_w = args.slot_w_R.data<float>()};
  launch("expert_rows, count", count_pairs, {p.blocks, kThreads, 4 * experts}, stream, p);
  if (p.blocks > 1) {
    launch("expert_rows, add", sum_pairs, {blocks_for(experts, 32), kThreads}, stream, p);
  }
  launch("expert_rows, number", number_pairs, {p.blocks, kThreads, (4 + 2 * kWarps) * experts},
         stream, p);
}

void make_slot_maps_cuda(const EpPlan& plan, const TensorView& w_TK, const SlotMaps& maps,
                         const Stream& stream) {
  const int64_t pairs = plan.tokens * plan.topk;
  const Params p{.pairs = pairs,
                 .capacity = plan.capacity,
                 .pair_blocks = blocks_for(pairs, kThreads),
                 .topk = plan.topk,
                 .slot_TK = plan.slot_TK.data<int32_t>(),
                 .slot_row = plan.slot_row.data<int32_t>(),
                 .w_TK = w_TK.data<float>(),
                 .source = maps.source_C.data<int32_t>(),
                 .slot_w = maps.slot_w.data<float>()};
  launch("ep slot_maps", fill_maps, {p.pair_blocks + blocks_for(p.capacity, kThreads), kThreads},
         stream, p);
}

}  // namespace moiety::moe
