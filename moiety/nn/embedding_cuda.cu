// The embedding on GPUs. In backward every occurrence counts those before it, which gives its place
// in the order by token and position; then warps and blocks sum the runs of one token. Counting is
// quadratic in the number of tokens, yet for the tokens of a step it is a small part of the cost of
// the sums.
#include "moiety/base/copy.h"
#include "moiety/base/launch.cuh"
#include "moiety/formats/fp32.h"
#include "moiety/formats/octet.cuh"
#include "moiety/nn/element.h"
#include "moiety/nn/embedding.h"
#include "moiety/nn/embedding_sum.h"

namespace moiety::nn {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kColumns = 32 * kOctet;  // columns of a warp
constexpr int64_t kBlock = kEmbeddingBlock;
constexpr uint32_t kWarp = 0xFFFFFFFFu;

struct Lookup {
  const void* table;
  const int32_t* token;
  void* out;
  int64_t tokens, rows, d_model, first, vocabulary;
};

// One warp per token.
template <class T, bool kVector>
__global__ void __launch_bounds__(kThreads) look_up(Lookup p) {
  const int64_t t = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  if (t >= p.tokens) return;
  const int64_t token = p.token[t], row = token - p.first;
  const bool here = row >= 0 && row < p.rows;
  const bool known = token >= 0 && token < p.vocabulary;
  const T* from = static_cast<const T*>(p.table) + (here ? row * p.d_model : 0);
  T* to = static_cast<T*>(p.out) + t * p.d_model;
  const float fill = known ? 0.0f : kCanonicalNan;
  const float filled[kOctet] = {fill, fill, fill, fill, fill, fill, fill, fill};
#pragma unroll 4
  for (int64_t c = threadIdx.x % 32 * kOctet; c < p.d_model; c += kColumns) {
    const int64_t valid = p.d_model - c;
    store_octet<kVector>(
        to + c, here && known ? load_octet<kVector>(from + c, valid) : round_octet<T>(filled),
        valid);
  }
}

// ---- the order of occurrences

constexpr int kTile = 4096;                  // tokens in shared memory
constexpr int kSlices = 8;                   // lanes that count for one token
constexpr int kRanked = kThreads / kSlices;  // tokens of a block

// Sorts: key[place] = occurrence(token, t). Every lane of a token counts in a part of each tile.
__global__ void __launch_bounds__(kThreads)
    sort_occurrences(const int32_t* token, int64_t tokens, int64_t* key) {
  __shared__ int4 tile[kTile / 4];
  const int slice = threadIdx.x % kSlices;
  const int64_t t = int64_t{blockIdx.x} * kRanked + threadIdx.x / kSlices;
  const int32_t own = t < tokens ? token[t] : 0;
  int64_t place = 0;
  for (int64_t base = 0; base < tokens; base += kTile) {
    __syncthreads();  // the last tile is used up
    for (int i = threadIdx.x; i < kTile; i += kThreads) {
      // Places past the last token come after every token.
      reinterpret_cast<int32_t*>(tile)[i] = base + i < tokens ? token[base + i] : INT32_MAX;
    }
    __syncthreads();
    int before = 0;
    if (t >= base && t < base + kTile) {
      const auto at = int(t - base);
      for (int i = slice; i < kTile; i += kSlices) {
        const int32_t other = reinterpret_cast<const int32_t*>(tile)[i];
        before += other < own || (other == own && i < at);
      }
    } else {
      // Among equal tokens, those of earlier tiles come first.
      const auto count = [&](auto is_before) {
#pragma unroll 4
        for (int i = slice; i < kTile / 4; i += kSlices) {
          const int4 v = tile[i];
          before += is_before(v.x) + is_before(v.y) + is_before(v.z) + is_before(v.w);
        }
      };
      if (t < base) {
        count([&](int32_t other) { return int(other < own); });
      } else {
        count([&](int32_t other) { return int(other <= own); });
      }
    }
    place += __reduce_add_sync(0xFFu << threadIdx.x % 32 / kSlices * kSlices, before);
  }
  if (t < tokens && slice == 0) key[place] = occurrence(own, t);
}

// ---- sums

struct Sums {
  const void* dout;
  const int64_t* key;  // sorted
  float* grad;
  int64_t tokens, rows, d_model, first;
  int64_t tiles;        // tiles of columns
  int64_t long_blocks;  // blocks of threads for runs of more than kBlock occurrences
  bool accumulate;

  // The token of occurrence i; -1 outside the occurrences.
  __device__ int64_t token(int64_t i) const {
    return i >= 0 && i < tokens ? row_of_occurrence(key[i]) : -1;
  }
  // The row of a token, or -1 if it has none here.
  __device__ int64_t row(int64_t token) const {
    const int64_t at = token - first;
    return token >= 0 && at >= 0 && at < rows ? at : -1;
  }
};

// Sums dout over occurrences [begin, end), at most kBlock, from +0, for the columns of a lane from
// c on. Whole warps call it.
template <class T, bool kVector>
__device__ void sum_block(const Sums& p, int64_t begin, int64_t end, int64_t c,
                          float (&sum)[kOctet]) {
  const int lane = threadIdx.x % 32;
  for (float& v : sum) v = 0;
  for (int64_t base = begin; base < end; base += 32) {
    const int64_t mine = base + lane < end ? p.key[base + lane] & 0xFFFFFFFF : 0;
    const int count = int(min(end - base, int64_t{32}));
#pragma unroll 8
    for (int i = 0; i < count; ++i) {
      const int64_t t = __shfl_sync(kWarp, mine, i);
      const Octet<T> x =
          load_octet<kVector>(static_cast<const T*>(p.dout) + t * p.d_model + c, p.d_model - c);
#pragma unroll
      for (int k = 0; k < kOctet; ++k) sum[k] += x[k];
    }
  }
}

// Sums a short run: a warp has an occurrence and a tile of columns, and works if the occurrence is
// the first of its token and the token has at most kBlock.
template <class T, bool kVector>
__device__ void sum_short_run(const Sums& p, int64_t warp) {
  const int lane = threadIdx.x % 32;
  const int64_t i = warp / p.tiles, c = (warp - i * p.tiles) * kColumns + lane * kOctet;
  const int64_t token = p.token(i), row = p.row(token);
  const int64_t before = p.token(i - 1), behind = p.token(i + kBlock);
  const bool low = p.token(i + lane) == token, high = p.token(i + 32 + lane) == token;
  if (row < 0 || before == token || behind == token) return;
  const int count = __popc(__ballot_sync(kWarp, low)) + __popc(__ballot_sync(kWarp, high));
  float* grad = p.grad + row * p.d_model + c;
  Octet<float> old;
  if (p.accumulate) old = load_octet<kVector>(grad, p.d_model - c);
  float sum[kOctet];
  sum_block<T, kVector>(p, i, i + count, c, sum);
#pragma unroll
  for (int k = 0; k < kOctet; ++k) sum[k] = p.accumulate ? old[k] + sum[k] : sum[k];
  store_octet<kVector>(grad, round_octet<float>(sum), p.d_model - c);
}

// Sums a long run: a thread block has a tile of columns and kBlock occurrences, among which at most
// one begins a longer run. Each warp sums a block of the run; then the threads, a column each, add
// the sums of all warps.
template <class T, bool kVector>
__device__ void sum_long_run(const Sums& p, int64_t block) {
  static_assert(kThreads == kColumns && kBlock == 64);
  __shared__ float blocks[kWarps][kColumns];
  __shared__ int found;
  const int64_t window = block / p.tiles, c0 = (block - window * p.tiles) * kColumns;
  if (threadIdx.x == 0) found = -1;
  __syncthreads();
  if (threadIdx.x < kBlock) {
    const int64_t i = window * kBlock + threadIdx.x, token = p.token(i);
    if (token >= 0 && p.token(i - 1) != token && p.token(i + kBlock) == token) {
      found = int(threadIdx.x);
    }
  }
  __syncthreads();
  if (found < 0) return;
  const int64_t begin = window * kBlock + found, token = p.token(begin), row = p.row(token);
  if (row < 0) return;
  int64_t end = begin + kBlock, past = p.tokens;  // the run's end is in (end, past]
  while (end < past) {
    const int64_t middle = (end + past) / 2;
    p.token(middle) == token ? end = middle + 1 : past = middle;
  }
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float total = 0;
  for (int64_t first = begin; first < end; first += kWarps * kBlock) {
    const int64_t own = min(first + warp * kBlock, end);
    float sum[kOctet];
    sum_block<T, kVector>(p, own, min(own + kBlock, end), c0 + lane * kOctet, sum);
#pragma unroll
    for (int k = 0; k < kOctet; ++k) blocks[warp][lane * kOctet + k] = sum[k];
    __syncthreads();
    for (int w = 0; w < kWarps && first + w * kBlock < end; ++w) total += blocks[w][threadIdx.x];
    __syncthreads();
  }
  const int64_t c = c0 + threadIdx.x;
  if (c >= p.d_model) return;
  float* grad = p.grad + row * p.d_model + c;
  *grad = p.accumulate ? *grad + total : total;
}

// The thread blocks of long runs come first, since they take longest.
template <class T, bool kVector>
__global__ void __launch_bounds__(kThreads, 4) sum_runs(const __grid_constant__ Sums p) {
  const int64_t block = blockIdx.x;
  if (block < p.long_blocks) {
    sum_long_run<T, kVector>(p, block);
  } else {
    sum_short_run<T, kVector>(p, (block - p.long_blocks) * kWarps + threadIdx.x / 32);
  }
}

}  // namespace

void embedding_cuda(const EmbeddingArgs& a, const Stream& stream) {
  const int64_t rows = a.table_VD.size(0);
  const Lookup p{a.table_VD.raw(),
                 a.token_T.data<int32_t>(),
                 a.out_TD.raw(),
                 a.token_T.size(0),
                 rows,
                 a.table_VD.size(1),
                 a.slice.first,
                 a.slice.vocabulary > 0 ? a.slice.vocabulary : rows};
  const bool vector = octets_fit({&a.table_VD, &a.out_TD});
  with_storage(a.out_TD.dtype(), [&](auto element) {
    using T = decltype(element);
    launch("embedding", vector ? look_up<T, true> : look_up<T, false>,
           {blocks_for(p.tokens, kWarps), kThreads}, stream, p);
  });
}

void embedding_backward_cuda(const EmbeddingBackwardArgs& a, const Stream& stream) {
  const int64_t tokens = a.token_T.size(0);
  auto* key = a.workspace.data<int64_t>();
  if (!a.accumulate) fill_bytes(a.grad_VD, 0, stream);
  launch("embedding_backward", sort_occurrences, {blocks_for(tokens, kRanked), kThreads}, stream,
         a.token_T.data<int32_t>(), tokens, key);
  const int64_t d_model = a.dout_TD.size(1), tiles = blocks_for(d_model, kColumns);
  const Sums p{a.dout_TD.raw(),
               key,
               a.grad_VD.data<float>(),
               tokens,
               a.grad_VD.size(0),
               d_model,
               a.slice.first,
               tiles,
               blocks_for(tokens, kBlock) * tiles,
               a.accumulate};
  const bool vector = octets_fit({&a.dout_TD, &a.grad_VD});
  with_storage(a.dout_TD.dtype(), [&](auto element) {
    using T = decltype(element);
    launch("embedding_backward", vector ? sum_runs<T, true> : sum_runs<T, false>,
           {p.long_blocks + blocks_for(p.tokens * p.tiles, kWarps), kThreads}, stream, p);
  });
}

}  // namespace moiety::nn
