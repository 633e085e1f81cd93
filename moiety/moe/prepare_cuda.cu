// prepare on a GPU, for a group of one rank, in two launches: counts by blocks of tokens, whose last
// thread block makes their sums and the trim, with sums of the router's statistics beside them; and
// the numbers of pairs and rows, with the maps of slots. The order of pairs is that of the CPU: no
// number depends on which thread comes first.
#include "moiety/base/launch.cuh"
#include "moiety/moe/block_sums.cuh"
#include "moiety/moe/exchange_cuda.h"
#include "moiety/moe/trim.h"

namespace moiety::moe {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kBlockWarps = kTokenBlock / 32;
constexpr int kExpertsOfThread = 4;  // most experts of a thread in the trim
constexpr uint32_t kAll = 0xFFFFFFFFu;

struct Params {
  const void* idx;
  int64_t idx_stride, idx_step;
  bool wide;
  int64_t tokens, blocks, capacity, alignment;
  int64_t counting;  // thread blocks that count, one a block of tokens, at least one
  int parts;         // thread blocks that number a block of tokens: a divisor of its size
  int topk, experts;
  const int64_t* limit;  // may be null
  OverflowPolicy overflow;
  Epoch epoch;
  GpuState* state;
  int64_t *info, *rows_real, *rows_padded, *rows_before, *offset;
  int32_t *slot_TK, *row_T, *recv_token, *recv_slot, *slot_row;
  int32_t *count_E, *rows, *plan_tokens, *row_end_B, *pair_end_BE;
  const float* w_TK;  // null: no maps
  int32_t* source_C;
  float* slot_w;
  BlockSums statistics;

  __device__ int64_t index(int64_t t, int k) const {
    const int64_t at = t * idx_stride + k * idx_step;
    return wide ? static_cast<const int64_t*>(idx)[at] : static_cast<const int32_t*>(idx)[at];
  }
  // The number of pairs in block b.
  __device__ int pairs(int64_t b) const {
    const int64_t left = tokens - b * kTokenBlock;
    return static_cast<int>(left < kTokenBlock ? left : kTokenBlock) * topk;
  }
  // The index of pair i of block b.
  __device__ int64_t index_of(int64_t b, int i) const {
    return index(b * kTokenBlock + i / topk, i % topk);
  }
  __device__ bool valid(int64_t e) const { return e >= 0 && e < experts; }
};

__device__ inline int warp_sum(int v) { return __reduce_add_sync(kAll, v); }

// The lanes that have the same number, of which `bits` count: ballots, since a match of many different
// numbers takes ten times as long.
__device__ inline uint32_t lanes_with(int number, int bits) {
  uint32_t same = kAll;
#pragma unroll 4
  for (int i = 0; i < bits; ++i) {
    const bool set = number >> i & 1;
    const uint32_t with = __ballot_sync(kAll, set);
    same &= set ? with : ~with;
  }
  return same;
}

// Counts the pairs per expert and the rows of a block of tokens, and their errors; and marks that no
// slot has a row yet.
__device__ void count_block(const Params& p) {
  extern __shared__ int32_t pairs_E[];
  __shared__ uint8_t has_pair[kTokenBlock];
  const int64_t b = blockIdx.x;
  for (int64_t i = b * kThreads + threadIdx.x; i < p.capacity; i += p.counting * kThreads) {
    p.slot_row[i] = -1;
    if (!p.w_TK) continue;
    p.source_C[i] = -1;
    p.slot_w[i] = 0;
  }
  for (int e = threadIdx.x; e < p.experts; e += kThreads) pairs_E[e] = 0;
  const bool has_token = threadIdx.x < kTokenBlock;
  if (has_token) has_pair[threadIdx.x] = 0;
  __syncthreads();
  int masked = 0, bad = 0, first_bad = 0;
  for (int i = threadIdx.x; i < p.pairs(b); i += kThreads) {
    const int64_t e = p.index_of(b, i);
    if (p.valid(e)) {
      atomicAdd(&pairs_E[e], 1);
      has_pair[i / p.topk] = 1;
    } else if (e < 0) {
      ++masked;
    } else if (bad++ == 0) {
      first_bad = i;
    }
  }
  if (bad > 0) {
    const int64_t at = b * kTokenBlock * p.topk + first_bad;
    atomicMax(&p.state->behind_bad, static_cast<unsigned long long>(p.tokens * p.topk - at));
  }
  masked = warp_sum(masked);
  bad = warp_sum(bad);
  if (threadIdx.x % 32 == 0) {
    if (masked > 0) atomicAdd(&p.state->masked, static_cast<unsigned long long>(masked));
    if (bad > 0) atomicAdd(&p.state->bad, static_cast<unsigned long long>(bad));
  }
  __syncthreads();
  const int rows = __syncthreads_count(has_token && has_pair[threadIdx.x % kTokenBlock]);
  if (b >= p.blocks) return;
  if (threadIdx.x == 0) p.row_end_B[b] = rows;
  for (int e = threadIdx.x; e < p.experts; e += kThreads) {
    p.pair_end_BE[b * p.experts + e] = pairs_E[e];
  }
}

// Turns the counts of blocks into their sums up to the end of each block. A warp has 32 columns,
// experts, then the rows; where there are few, it has a part of their blocks of tokens.
__device__ void add_up(const Params& p) {
  __shared__ int32_t part_sum[kWarps][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int groups = p.experts / 32 + 1, parts = max(1, kWarps / groups), at_once = kWarps / parts;
  const int64_t share = (p.blocks + parts - 1) / parts;
  const int part = warp % parts;
  for (int first = 0; first < groups; first += at_once) {
    const int column = (first + warp / parts) * 32 + lane;
    const bool of_rows = column == p.experts;
    const bool exists = warp / parts < at_once && column <= p.experts;
    int32_t* const counts = of_rows ? p.row_end_B : p.pair_end_BE + column;
    const int64_t stride = of_rows ? 1 : p.experts;
    const int64_t begin = min(part * share, p.blocks);
    const int64_t end = exists ? min(begin + share, p.blocks) : begin;
    int32_t sum = 0;
#pragma unroll 8
    for (int64_t b = begin; b < end; ++b) sum += counts[b * stride];
    part_sum[warp][lane] = sum;
    __syncthreads();
    sum = 0;
    for (int w = warp - part; w < warp; ++w) sum += part_sum[w][lane];
    __syncthreads();
#pragma unroll 8
    for (int64_t b = begin; b < end; ++b) counts[b * stride] = sum += counts[b * stride];
    if (exists && part == parts - 1) *(of_rows ? p.rows : p.count_E + column) = sum;
  }
}

// The sum over the block's threads before this one; `total` gets the sum over all. All threads call
// it.
__device__ int64_t sum_before(int64_t v, int64_t& total) {
  __shared__ int64_t sum_of_warp[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t sum = v;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    const int64_t below = __shfl_up_sync(kAll, sum, o);
    if (lane >= o) sum += below;
  }
  __syncthreads();  // some threads may still read the sums of the call before
  if (lane == 31) sum_of_warp[warp] = sum;
  __syncthreads();
  int64_t all = sum_of_warp[lane];
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    const int64_t below = __shfl_up_sync(kAll, all, o);
    if (lane >= o) all += below;
  }
  total = __shfl_sync(kAll, all, 31);
  const int64_t warps_before = __shfl_sync(kAll, all, warp == 0 ? 0 : warp - 1);
  return (warp == 0 ? 0 : warps_before) + sum - v;
}

// The experts of a thread in the trim, which are neighbours.
struct Trim {
  int first, count;
  int64_t pairs[kExpertsOfThread], blocks[kExpertsOfThread];

  __device__ int64_t used(int64_t limit) const {
    int64_t sum = 0, total;
#pragma unroll
    for (int i = 0; i < kExpertsOfThread; ++i) sum += min(blocks[i], limit);
    sum_before(sum, total);
    return total;
  }
  // Takes blocks from the longest experts, so that all have as many as there is room for.
  __device__ void shorten(int64_t room, int64_t wanted) {
    const auto [limit, rest] =
        block_limit(room, wanted, wanted, [&](int64_t most) { return used(most); });
    int64_t longer = 0, all;
#pragma unroll
    for (int i = 0; i < kExpertsOfThread; ++i) longer += blocks[i] > limit;
    longer = sum_before(longer, all);
#pragma unroll
    for (int i = 0; i < kExpertsOfThread; ++i) {
      const bool more = blocks[i] > limit && longer++ < rest;
      blocks[i] = min(blocks[i], limit) + more;
    }
  }
};

// Counts of the state, read before they are needed.
struct Found {
  unsigned long long masked, bad, behind_bad;
};

__device__ void write_findings(const Params& p, const Found& found, int64_t required,
                               int64_t dropped, int64_t capacity, unsigned long long largest) {
  GpuState& state = *p.state;
  if (found.bad > 0) {
    const int64_t pair = p.tokens * p.topk - static_cast<int64_t>(found.behind_bad);
    const int64_t t = pair / p.topk, k = pair % p.topk;
    state.findings.add({.epoch = p.epoch,
                        .kind = Finding::Kind::kBadIndex,
                        .rank = 0,
                        .value = {t, k, p.index(t, static_cast<int>(k)), 0}});
  }
  state.masked = state.bad = state.behind_bad = 0;
  if (dropped == 0) return;
  if (p.overflow == OverflowPolicy::kReport) state.findings.add_overflow(required, dropped);
  if (p.overflow != OverflowPolicy::kError) return;
  const int64_t expert = p.experts - 1 - static_cast<int64_t>(largest % p.experts);
  state.findings.add(
      {.epoch = p.epoch,
       .kind = Finding::Kind::kCapacity,
       .rank = 0,
       .value = {required, capacity, expert, static_cast<int64_t>(largest / p.experts)}});
}

struct RowsOfAll {
  int64_t padded, kept, required, dropped, capacity;
};
__device__ void write_info(const Params& p, const Found& found, const RowsOfAll& rows) {
  int64_t info[16] = {};
  info[kInfoPadded] = rows.padded;
  info[kInfoKept] = rows.kept;
  info[kInfoRequired] = info[kInfoGroupRequired] = rows.required;
  info[kInfoDropped] = info[kInfoOwnDropped] = info[kInfoGroupDropped] = rows.dropped;
  info[kInfoCapacity] = rows.capacity;
  info[kInfoGroupTokens] = p.tokens;
  info[kInfoOwnMasked] = static_cast<int64_t>(found.masked);
  info[kInfoOwnBad] = static_cast<int64_t>(found.bad);
  info[kInfoGroupOverflow] = rows.dropped > 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) p.info[i] = info[i];
}

// Finds the number of every expert's pairs that are kept (trim.h), their places, and the info
// words. One block.
__device__ void trim_experts(const Params& p) {
  __shared__ unsigned long long largest;  // pairs, then the smallest expert with so many
  Found found{};
  if (threadIdx.x == 0) {
    largest = 0;
    found = {p.state->masked, p.state->bad, p.state->behind_bad};
  }
  const int64_t limit_here = p.limit ? min(max(*p.limit, int64_t{0}), p.capacity) : p.capacity;
  const int64_t capacity = limit_here, room = capacity / p.alignment;
  const int each = (p.experts + kThreads - 1) / kThreads;
  Trim mine;
  mine.first = static_cast<int>(threadIdx.x) * each;
  mine.count = min(each, max(0, p.experts - mine.first));
  int64_t pairs_here = 0, blocks_here = 0, pairs, wanted;
#pragma unroll
  for (int i = 0; i < kExpertsOfThread; ++i) {
    mine.pairs[i] = i < mine.count ? p.count_E[mine.first + i] : 0;
    mine.blocks[i] = (mine.pairs[i] + p.alignment - 1) / p.alignment;
    pairs_here += mine.pairs[i];
    blocks_here += mine.blocks[i];
  }
  sum_before(pairs_here, pairs);
  int64_t offset = sum_before(blocks_here, wanted), blocks = wanted, kept = pairs;
  const auto kept_of = [&](int i) { return min(mine.pairs[i], mine.blocks[i] * p.alignment); };
  if (wanted > room) {  // as all threads know
    mine.shorten(room, wanted);
    pairs_here = blocks_here = 0;
#pragma unroll
    for (int i = 0; i < kExpertsOfThread; ++i) {
      pairs_here += kept_of(i);
      blocks_here += mine.blocks[i];
    }
    sum_before(pairs_here, kept);
    offset = sum_before(blocks_here, blocks);
  }
  offset *= p.alignment;
#pragma unroll
  for (int i = 0; i < kExpertsOfThread; ++i) {
    if (i >= mine.count) break;
    const int e = mine.first + i;
    p.rows_before[e] = mine.pairs[i];
    p.rows_real[e] = kept_of(i);
    p.rows_padded[e] = mine.blocks[i] * p.alignment;
    p.offset[e] = offset;
    offset += mine.blocks[i] * p.alignment;
  }
  const int64_t dropped = pairs - kept, required = wanted * p.alignment;
  if (dropped > 0 && p.overflow == OverflowPolicy::kError) {
#pragma unroll
    for (int i = 0; i < kExpertsOfThread; ++i) {
      if (i >= mine.count) break;
      const int64_t key = mine.pairs[i] * p.experts + p.experts - 1 - (mine.first + i);
      atomicMax(&largest, static_cast<unsigned long long>(key));
    }
    __syncthreads();
  }
  if (threadIdx.x > 0) return;
  const int64_t padded = blocks * p.alignment;
  p.offset[p.experts] = padded;
  *p.plan_tokens = static_cast<int32_t>(p.tokens);
  write_info(p, found, {padded, kept, required, dropped, capacity});
  write_findings(p, found, required, dropped, capacity, largest);
}

__global__ void __launch_bounds__(kThreads) count_and_trim(const __grid_constant__ Params p) {
  __shared__ bool last;
  if (blockIdx.x >= p.counting) {
    return detail::add_blocks<kThreads>(p.statistics, blockIdx.x - p.counting);
  }
  count_block(p);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(&p.state->blocks_done, 1) == p.counting - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  if (threadIdx.x == 0) p.state->blocks_done = 0;
  add_up(p);
  __syncthreads();
  trim_experts(p);
}

// Shared memory of number_blocks: of each expert the first slot of the block's pairs and how many of
// them get one; the pairs' experts, then their slots; and an expert's pairs before those of a warp.
struct Numbers {
  int32_t *first_E, *room_E, *pairs;
  uint16_t* before_WE;

  __device__ Numbers(const Params& p, int32_t* memory)
      : first_E(memory),
        room_E(first_E + p.experts),
        pairs(room_E + p.experts),
        before_WE(reinterpret_cast<uint16_t*>(pairs + kTokenBlock * p.topk)) {}
  static int64_t bytes(const Params& p, int warps) {
    return 8 * int64_t{p.experts} + 4 * kTokenBlock * int64_t{p.topk} +
           2 * warps * int64_t{p.experts};
  }
};

// Turns the pairs of each warp into those of the warps before it.
__device__ void add_warps(const Params& p, uint16_t* before_WE, int warps) {
  constexpr int kTogether = 8;  // divides the number of warps
  for (int e = threadIdx.x; e < p.experts; e += blockDim.x) {
    int sum = 0;
    for (int first = 0; first < warps; first += kTogether) {
      uint16_t* const counts = before_WE + first * p.experts + e;
      uint16_t count[kTogether];
#pragma unroll
      for (int w = 0; w < kTogether; ++w) count[w] = counts[w * p.experts];
#pragma unroll
      for (int w = 0; w < kTogether; ++w) {
        counts[w * p.experts] = static_cast<uint16_t>(sum);
        sum += count[w];
      }
    }
  }
}

// Numbers the pairs and rows of a block of tokens. A warp has a run of its pairs; lanes with the
// same expert find each other, so that the number of a pair follows from its order. Where there are
// few blocks, several thread blocks number the same pairs, and each writes those of its tokens: most
// of the time goes to what is written here and there.
__global__ void __launch_bounds__(kThreads) number_blocks(const __grid_constant__ Params p) {
  extern __shared__ int32_t memory[];
  __shared__ uint8_t has_pair[kTokenBlock], is_alive[kTokenBlock];
  __shared__ int32_t row_of[kTokenBlock], rows_of_warp[kBlockWarps];
  const Numbers at(p, memory);
  const int64_t b = blockIdx.x / p.parts;
  const int part = static_cast<int>(blockIdx.x - b * p.parts);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pairs = p.pairs(b);
  const int threads = static_cast<int>(blockDim.x), warps = threads / 32;
  const int share = ((pairs + 31) / 32 + warps - 1) / warps * 32;
  const int begin = warp * share, end = min(begin + share, pairs);
  uint16_t* const before_E = at.before_WE + warp * p.experts;
  const int part_tokens = kTokenBlock / p.parts, first_token = part * part_tokens;
  const int first_pair = first_token * p.topk,
            last_pair = min(first_pair + part_tokens * p.topk, pairs);
  // The number of bits in which -1 is no expert.
  const int bits = 32 - __clz(p.experts);
  const bool has_token = threadIdx.x < kTokenBlock;
  const int rows_before = b == 0 || !has_token ? 0 : p.row_end_B[b - 1];
  for (int i = threadIdx.x; i < pairs; i += threads) {
    const int64_t index = p.index_of(b, i);
    at.pairs[i] = p.valid(index) ? static_cast<int32_t>(index) : -1;
  }
  for (int e = threadIdx.x; e < p.experts; e += threads) {
    const int32_t before = b == 0 ? 0 : p.pair_end_BE[(b - 1) * p.experts + e];
    at.first_E[e] = static_cast<int32_t>(p.offset[e] + before);
    at.room_E[e] = static_cast<int32_t>(p.rows_real[e] - before);
  }
  for (int i = threadIdx.x; i < warps * p.experts; i += threads) at.before_WE[i] = 0;
  if (has_token) has_pair[threadIdx.x] = is_alive[threadIdx.x] = 0;
  __syncthreads();
  // Calls f(pair, expert or -1, lanes with the same expert).
  const auto for_pairs = [&](auto&& f) {
    for (int i = begin + lane; i - lane < end; i += 32) {
      const int e = i < end ? at.pairs[i] : -1;
      const uint32_t same = lanes_with(e, bits);
      f(i, e, same);
      __syncwarp();
      if (e >= 0 && lane == __ffs(same) - 1) before_E[e] += __popc(same);
      __syncwarp();
    }
  };
  for_pairs([](int, int, uint32_t) {});
  __syncthreads();
  add_warps(p, at.before_WE, warps);
  __syncthreads();
  for_pairs([&](int i, int e, uint32_t same) {
    if (i >= end) return;
    int32_t slot = -1;
    if (e >= 0) {
      const int position = before_E[e] + __popc(same & ((1u << lane) - 1));
      if (position < at.room_E[e]) slot = at.first_E[e] + position;
      has_pair[i / p.topk] = 1;
      if (slot >= 0) is_alive[i / p.topk] = 1;
    }
    at.pairs[i] = slot;
  });
  __syncthreads();
  const uint32_t with_row = __ballot_sync(kAll, has_token && has_pair[threadIdx.x % kTokenBlock]);
  if (has_token && lane == 0) rows_of_warp[warp] = __popc(with_row);
  __syncthreads();
  if (has_token) {
    int row = rows_before + __popc(with_row & ((1u << lane) - 1));
    for (int w = 0; w < warp; ++w) row += rows_of_warp[w];
    const int64_t t = b * kTokenBlock + threadIdx.x;
    row_of[threadIdx.x] = row;
    if (static_cast<int>(threadIdx.x) / part_tokens == part) {
      if (t < p.tokens) p.row_T[t] = is_alive[threadIdx.x] ? row : -1;
      if (has_pair[threadIdx.x]) p.recv_token[row] = static_cast<int32_t>(t);
    }
  }
  __syncthreads();
  const int64_t first = b * kTokenBlock * p.topk;
  for (int i = first_pair + static_cast<int>(threadIdx.x); i < last_pair; i += threads) {
    const float weight = p.w_TK ? p.w_TK[first + i] : 0;
    const int token = i / p.topk;
    const int32_t slot = at.pairs[i];
    p.slot_TK[first + i] = slot;
    if (!has_pair[token]) continue;
    p.recv_slot[int64_t{row_of[token]} * p.topk + i % p.topk] = slot;
    if (slot < 0) continue;
    p.slot_row[slot] = row_of[token];
    if (!p.w_TK) continue;
    p.source_C[slot] = static_cast<int32_t>(b * kTokenBlock + token);
    p.slot_w[slot] = weight;
  }
}

__global__ void report(int64_t* out, int64_t stride, GpuState* state) {
  out[threadIdx.x * stride] = state->findings.report[threadIdx.x];
  state->findings.report[threadIdx.x] = 0;
}

}  // namespace

void prepare_cuda(const EpPlan& plan, const PrepareArgs& args, Epoch epoch, GpuState* state,
                  const Stream& stream) {
  const TensorView& idx = args.idx_TK;
  const auto ints = [](const TensorView& x) { return x.data<int32_t>(); };
  const auto words = [](const TensorView& x) { return x.data<int64_t>(); };
  const int64_t blocks = blocks_for(plan.tokens, kTokenBlock);
  const Params p{.idx = idx.raw(),
                 .idx_stride = idx.stride(0),
                 .idx_step = idx.stride(1),
                 .wide = idx.dtype() == DType::kInt64,
                 .tokens = plan.tokens,
                 .blocks = blocks,
                 .capacity = plan.capacity,
                 .alignment = plan.alignment,
                 .counting = std::max<int64_t>(blocks, 1),
                 .parts = blocks > 64   ? 1
                          : blocks > 32 ? 2
                                        : 4,
                 .topk = plan.topk,
                 .experts = static_cast<int>(plan.count_RE.size(1)),
                 .limit = args.capacity_limit.data<int64_t>(),
                 .overflow = args.overflow,
                 .epoch = epoch,
                 .state = state,
                 .info = words(plan.info),
                 .rows_real = words(plan.rows_real),
                 .rows_padded = words(plan.rows_padded),
                 .rows_before = words(plan.rows_before),
                 .offset = words(plan.offset),
                 .slot_TK = ints(plan.slot_TK),
                 .row_T = ints(plan.row_TR),
                 .recv_token = ints(plan.recv_token),
                 .recv_slot = ints(plan.recv_slot),
                 .slot_row = ints(plan.slot_row),
                 .count_E = ints(plan.count_RE),
                 .rows = ints(plan.rows_RR),
                 .plan_tokens = ints(plan.tokens_R),
                 .row_end_B = ints(plan.row_end_BR),
                 .pair_end_BE = ints(plan.pair_end_BE),
                 .w_TK = args.w_TK.data<float>(),
                 .source_C = ints(args.maps.source_C),
                 .slot_w = args.maps.slot_w.data<float>(),
                 .statistics = args.statistics};
  launch("ep prepare, count and trim", count_and_trim,
         {p.counting + detail::thread_blocks(p.statistics), kThreads, 4 * int64_t{p.experts}},
         stream, p);
  // More warps than these have no shared memory where there are many experts.
  const int warps = p.experts <= 1024 ? kWarps : kBlockWarps;
  launch("ep prepare, number", number_blocks,
         {p.parts * blocks, warps * 32, Numbers::bytes(p, warps)}, stream, p);
}

void take_report_cuda(const TensorView& out, GpuState* state, const Stream& stream) {
  launch("ep take_report", report, {1, 3}, stream, out.data<int64_t>(), out.stride(0), state);
}

}  // namespace moiety::moe
