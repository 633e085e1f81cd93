// Attention by tensor cores, tile by tile (Dao, "FlashAttention-2", 2023). A warp has whole rows of
// scores, of queries (forward, dQ) or of keys (dK, dV, from transposed scores), so that
// accumulators of one product are operands of the next. Every sum has one owner, so results are
// always the same bits; the passes for dQ and for dK, dV each compute the scores again.
#include "moiety/formats/octet.cuh"
#include "moiety/gemm/mma_device.cuh"
#include "moiety/nn/attention_device.cuh"

namespace moiety::nn {
namespace {

using namespace device;
using namespace moiety::device;

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kForwardQueries = 32 * kWarps, kForwardKeys = 64;
constexpr int kGradientQueries = 32 * kWarps, kGradientKeys = 32;
constexpr int kOwnKeys = 16 * kWarps, kStepQueries = 32;

__device__ float exp2_of(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

template <int kC>
struct Tiles {
  static constexpr int kPieces = kC / 8;
  static constexpr int bytes(int rows) { return rows * kC * 2; }

  // Bytes of one step of key_gradient: Q and dO, and two words (lse and delta) for each query.
  static constexpr int step_bytes() { return 2 * bytes(kStepQueries) + 2 * kStepQueries * 4; }

  // Loads rows [first, first + kRows) of a head, with zeros from row `end` on.
  template <int kRows>
  __device__ static void load(uint32_t to, const HeadRows<uint16_t>& x, int64_t first,
                              int64_t end) {
    static_assert(kRows * kPieces % kThreads == 0);
#pragma unroll
    for (int n = 0; n < kRows * kPieces / kThreads; ++n) {
      const int index = threadIdx.x + n * kThreads, row = index / kPieces, piece = index % kPieces;
      const bool there = first + row < end;
      copy_piece(to + piece_offset<kPieces>(row, piece), x[there ? first + row : 0] + piece * 8,
                 there ? 16 : 0);
    }
  }
};

// The accumulators of a block of 16 kM rows and 8 kN columns.
template <int kM, int kN>
struct Block {
  float v[kM][kN][4];

  __device__ void clear() {
#pragma unroll
    for (auto& row : v) {
#pragma unroll
      for (auto& x : row) x[0] = x[1] = x[2] = x[3] = 0;
    }
  }
  // += a b^T, where a is the tile's rows from `row` on and b the tile's rows from the first; the
  // inner dimension is kC columns.
  template <int kC>
  __device__ void add_rows_by_rows(uint32_t a_tile, int row, uint32_t b_tile) {
    constexpr int kPieces = kC / 8;
#pragma unroll
    for (int depth = 0; depth < kC; depth += 16) {
      uint32_t a[kM][4], b[4];
#pragma unroll
      for (int i = 0; i < kM; ++i) load_left<kPieces>(a[i], a_tile, row + 16 * i, depth);
#pragma unroll
      for (int j = 0; j < kN; j += 2) {
        load_right<kPieces>(b, b_tile, 8 * j, depth);
#pragma unroll
        for (int i = 0; i < kM; ++i) {
          multiply(v[i][j], a[i], b[0], b[1]);
          multiply(v[i][j + 1], a[i], b[2], b[3]);
        }
      }
    }
  }
  // += a b, where a's columns are the rows of tile b, whose columns are this block's.
  template <int kDepth>
  __device__ void add_product(const uint32_t (&a)[kM][kDepth / 16][4], uint32_t b_tile) {
    constexpr int kPieces = kN;
#pragma unroll
    for (int depth = 0; depth < kDepth; depth += 16) {
#pragma unroll
      for (int j = 0; j < kN; j += 2) {
        uint32_t b[4];
        load_right_turned<kPieces>(b, b_tile, 8 * j, depth);
#pragma unroll
        for (int i = 0; i < kM; ++i) {
          multiply(v[i][j], a[i][depth / 16], b[0], b[1]);
          multiply(v[i][j + 1], a[i][depth / 16], b[2], b[3]);
        }
      }
    }
  }
  // Gives the block as an operand of add_product.
  __device__ void to_operand(uint32_t (&out)[kM][kN / 2][4]) const {
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int j = 0; j < kN; j += 2) {
        out[i][j / 2][0] = bf16_word(v[i][j][0], v[i][j][1]);
        out[i][j / 2][1] = bf16_word(v[i][j][2], v[i][j][3]);
        out[i][j / 2][2] = bf16_word(v[i][j + 1][0], v[i][j + 1][1]);
        out[i][j / 2][3] = bf16_word(v[i][j + 1][2], v[i][j + 1][3]);
      }
    }
  }
  // Calls visit(i, j, e, row, column) for each element of this lane, counted from the block's
  // corner.
  template <class Visit>
  __device__ static void visit(Visit&& visit) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int j = 0; j < kN; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          visit(i, j, e, 16 * i + lane / 4 + e / 2 * 8, 8 * j + lane % 4 * 2 + e % 2);
        }
      }
    }
  }
  // Stores rows from `first` up to `end`, each times factor(i, half).
  template <class Factor>
  __device__ void store(const HeadRows<uint16_t>& to, int64_t first, int64_t end,
                        Factor&& factor) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t row = first + 16 * i + 8 * half + lane / 4;
        if (row >= end) continue;
        const float f = factor(i, half);
        auto* out = reinterpret_cast<uint32_t*>(to[row] + lane % 4 * 2);
#pragma unroll
        for (int j = 0; j < kN; ++j) {
          out[4 * j] = bf16_word(v[i][j][2 * half] * f, v[i][j][2 * half + 1] * f);
        }
      }
    }
  }
};

__device__ uint32_t shared_tiles() {
  extern __shared__ __align__(128) uint8_t shared[];
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}
__device__ const float* shared_floats(uint32_t address) {
  return static_cast<const float*>(__cvta_shared_to_generic(address));
}

// A block's rows of queries. Tiles with most keys come first, the heads of a tile together.
struct QueryTile {
  HeadIndex head;
  int64_t first;  // first query
  int64_t first_key, end_key;
  const int32_t* starts;

  __device__ QueryTile(const AttentionJob& job, int rows, int keys)
      : head(job, blockIdx.x % (job.sequences * job.groups * job.heads), job.heads) {
    const int64_t heads = job.sequences * job.groups * job.heads;
    const int64_t tiles = (job.queries + rows - 1) / rows;
    first = (tiles - 1 - blockIdx.x / heads) * rows;
    starts = head.starts(job);
    first_key = starts ? max(starts[first], 0) / keys * keys : 0;
    end_key = min(job.keys, job.keys - job.queries + min(first + rows, job.queries));
  }
  __device__ int64_t start_of(int64_t query, int64_t queries) const {
    return starts ? starts[min(query, queries - 1)] : 0;
  }
};

// ---- forward: 32 queries a warp, 64 keys at a time

// The online softmax of the rows of a warp.
struct Softmax {
  float most[2][2], sum[2][2];  // maximum of the scores, sum of a lane's columns
  float log2_scale;

  __device__ explicit Softmax(float scale) : log2_scale(scale * kLog2E) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      most[i / 2][i % 2] = -INFINITY;
      sum[i / 2][i % 2] = 0;
    }
  }
  // Turns scores into probabilities and scales o, as summed so far, to match.
  template <int kN, int kO>
  __device__ void add(Block<2, kN>& s, Block<2, kO>& o) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float high = most[i][half];
#pragma unroll
        for (int j = 0; j < kN; ++j) {
          high = fmaxf(high, fmaxf(s.v[i][j][2 * half], s.v[i][j][2 * half + 1]));
        }
        high = fmaxf(high, __shfl_xor_sync(~0u, high, 1));
        high = fmaxf(high, __shfl_xor_sync(~0u, high, 2));
        // A row that sees none of these keys has no probabilities yet.
        const float base = high == -INFINITY ? 0 : high * log2_scale;
        const float correction = exp2_of(fmaf(most[i][half], log2_scale, -base));
        most[i][half] = high;
        float total = sum[i][half] * correction;
#pragma unroll
        for (int j = 0; j < kN; ++j) {
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            s.v[i][j][e] = exp2_of(fmaf(s.v[i][j][e], log2_scale, -base));
            total += s.v[i][j][e];
          }
        }
        sum[i][half] = total;
#pragma unroll
        for (int j = 0; j < kO; ++j) {
          o.v[i][j][2 * half] *= correction;
          o.v[i][j][2 * half + 1] *= correction;
        }
      }
    }
  }
  __device__ void finish() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& x = sum[i / 2][i % 2];
      x += __shfl_xor_sync(~0u, x, 1);
      x += __shfl_xor_sync(~0u, x, 2);
    }
  }
};

template <int kC>
__global__ void __launch_bounds__(kThreads, 2)
    attend_tiles(const __grid_constant__ AttentionJob job) {
  using T = Tiles<kC>;
  const uint32_t q_tile = shared_tiles(), k_tile = q_tile + T::bytes(kForwardQueries),
                 v_tile = k_tile + T::bytes(kForwardKeys);
  const QueryTile t(job, kForwardQueries, kForwardKeys);
  const auto keys = t.head.rows<uint16_t>(job.k), values = t.head.rows<uint16_t>(job.v);
  T::template load<kForwardQueries>(q_tile, t.head.rows<uint16_t>(job.q), t.first, job.queries);
  T::template load<kForwardKeys>(k_tile, keys, t.first_key, job.keys);
  commit_pieces();

  const int warp_row = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
  const int64_t offset = job.keys - job.queries;
  const int64_t last_start = t.start_of(t.first + kForwardQueries - 1, job.queries);
  Block<2, kC / 8> o;
  o.clear();
  Softmax softmax(job.scale);
  for (int64_t j = t.first_key; j < t.end_key; j += kForwardKeys) {
    wait_for_pieces<0>();
    __syncthreads();
    T::template load<kForwardKeys>(v_tile, values, j, job.keys);
    commit_pieces();
    Block<2, kForwardKeys / 8> s;
    s.clear();
    s.template add_rows_by_rows<kC>(q_tile, warp_row, k_tile);
    if (j + kForwardKeys - 1 > offset + t.first || j < last_start) {
      int low[2][2];  // first column that a row sees
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        low[i / 2][i % 2] = static_cast<int>(
            t.start_of(t.first + warp_row + i / 2 * 16 + i % 2 * 8 + lane / 4, job.queries) - j);
      }
      const int diagonal = static_cast<int>(offset + t.first + warp_row - j);
      s.visit([&](int i, int n, int e, int row, int column) {
        if (column > diagonal + row || column < low[i][e / 2]) s.v[i][n][e] = -INFINITY;
      });
    }
    softmax.add(s, o);
    uint32_t p[2][kForwardKeys / 16][4];
    s.to_operand(p);
    wait_for_pieces<0>();
    __syncthreads();
    if (j + kForwardKeys < t.end_key) {
      T::template load<kForwardKeys>(k_tile, keys, j + kForwardKeys, job.keys);
    }
    commit_pieces();
    o.template add_product<kForwardKeys>(p, v_tile);
  }
  softmax.finish();
  const int64_t first = t.first + warp_row;
  o.store(t.head.rows<uint16_t>(job.o), first, job.queries,
          [&](int i, int half) { return 1 / softmax.sum[i][half]; });
  float* lse = t.head.statistics(job, job.lse);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t row = first + i / 2 * 16 + i % 2 * 8 + lane / 4;
    if (lane % 4 != 0 || row >= job.queries) continue;
    lse[row] = softmax.most[i / 2][i % 2] * job.scale + logf(softmax.sum[i / 2][i % 2]);
  }
}

// ---- backward

// delta = dO . O, one warp per row.
template <int kC>
__global__ void __launch_bounds__(kThreads) dot_rows(const __grid_constant__ AttentionJob job) {
  const int64_t heads = job.sequences * job.groups * job.heads;
  const int64_t index = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int64_t row = index / heads;
  if (row >= job.queries) return;
  const HeadIndex h(job, index % heads, job.heads);
  const bf16 *d_out = h.rows<bf16>(job.d_out)[row], *o = h.rows<bf16>(job.o)[row];
  float sum = 0;
#pragma unroll
  for (int c = threadIdx.x % 32; c < kC; c += 32) sum = fmaf(float(d_out[c]), float(o[c]), sum);
  sum = sum_of_warp(sum);
  if (threadIdx.x % 32 == 0) h.statistics(job, job.delta)[row] = sum;
}

// Computes dQ: a warp takes 32 queries, and 32 keys at a time.
template <int kC>
__global__ void __launch_bounds__(kThreads, 2)
    query_gradient(const __grid_constant__ AttentionJob job) {
  using T = Tiles<kC>;
  constexpr int kStage = 2 * T::bytes(kGradientKeys);
  const uint32_t q_tile = shared_tiles(), d_tile = q_tile + T::bytes(kGradientQueries),
                 stages = d_tile + T::bytes(kGradientQueries);
  const QueryTile t(job, kGradientQueries, kGradientKeys);
  const auto keys = t.head.rows<uint16_t>(job.k), values = t.head.rows<uint16_t>(job.v);
  const auto load = [&](int64_t j, int stage) {
    if (j < t.end_key) {
      const uint32_t to = stages + stage * kStage;
      T::template load<kGradientKeys>(to, keys, j, job.keys);
      T::template load<kGradientKeys>(to + T::bytes(kGradientKeys), values, j, job.keys);
    }
    commit_pieces();
  };
  T::template load<kGradientQueries>(q_tile, t.head.rows<uint16_t>(job.q), t.first, job.queries);
  T::template load<kGradientQueries>(d_tile, t.head.rows<uint16_t>(job.d_out), t.first,
                                     job.queries);
  load(t.first_key, 0);

  const int warp_row = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
  const int64_t offset = job.keys - job.queries;
  const float log2_scale = job.scale * kLog2E;
  float lse[2][2], delta[2][2];
  int start[2][2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t row = t.first + warp_row + i / 2 * 16 + i % 2 * 8 + lane / 4;
    const bool there = row < job.queries;
    lse[i / 2][i % 2] = there ? t.head.statistics(job, job.lse)[row] * kLog2E : 0;
    delta[i / 2][i % 2] = there ? t.head.statistics(job, job.delta)[row] : 0;
    start[i / 2][i % 2] = static_cast<int>(t.start_of(row, job.queries));
  }
  const int64_t last_start = t.start_of(t.first + kGradientQueries - 1, job.queries);
  Block<2, kC / 8> dq;
  dq.clear();
  int stage = 0;
  for (int64_t j = t.first_key; j < t.end_key; j += kGradientKeys, stage ^= 1) {
    wait_for_pieces<0>();
    __syncthreads();
    load(j + kGradientKeys, stage ^ 1);
    const uint32_t k_tile = stages + stage * kStage;
    Block<2, kGradientKeys / 8> s, dp;
    s.clear();
    s.template add_rows_by_rows<kC>(q_tile, warp_row, k_tile);
    dp.clear();
    dp.template add_rows_by_rows<kC>(d_tile, warp_row, k_tile + T::bytes(kGradientKeys));
    const int diagonal = static_cast<int>(offset + t.first + warp_row - j);
    const int first_column = static_cast<int>(j);
    const bool edge = diagonal < kGradientKeys - 1 || j < last_start;
    s.visit([&](int i, int n, int e, int row, int column) {
      const float p = exp2_of(fmaf(s.v[i][n][e], log2_scale, -lse[i][e / 2]));
      s.v[i][n][e] = job.scale * p * (dp.v[i][n][e] - delta[i][e / 2]);
      if (edge && (column > diagonal + row || first_column + column < start[i][e / 2])) {
        s.v[i][n][e] = 0;
      }
    });
    uint32_t ds[2][kGradientKeys / 16][4];
    s.to_operand(ds);
    dq.template add_product<kGradientKeys>(ds, k_tile);
  }
  dq.store(t.head.rows<uint16_t>(job.dq), t.first + warp_row, job.queries,
           [](int, int) { return 1.0f; });
}

// Computes dK and dV: a warp takes 16 keys, and 32 queries at a time, over the heads of the group.
template <int kC>
__global__ void __launch_bounds__(kThreads, 2)
    key_gradient(const __grid_constant__ AttentionJob job) {
  using T = Tiles<kC>;
  constexpr int kStage = T::step_bytes();
  const uint32_t k_tile = shared_tiles(), v_tile = k_tile + T::bytes(kOwnKeys),
                 stages = v_tile + T::bytes(kOwnKeys);
  const int64_t groups = job.sequences * job.groups;
  HeadIndex h(job, blockIdx.x % groups, 1);
  const int64_t first_key = blockIdx.x / groups * kOwnKeys;
  const int64_t offset = job.keys - job.queries;
  const int32_t* starts = h.starts(job);
  const int64_t first = max(int64_t{0}, first_key - offset) / kStepQueries * kStepQueries;
  const int64_t end = first_query_after(starts, job.queries, first_key + kOwnKeys - 1);
  const int64_t steps = max(int64_t{0}, end - first + kStepQueries - 1) / kStepQueries;

  const auto load = [&](int64_t n, int stage) {
    if (n < steps * job.heads) {
      h.head = n / steps;
      const int64_t query = first + (n - h.head * steps) * kStepQueries;
      const uint32_t to = stages + stage * kStage;
      T::template load<kStepQueries>(to, h.rows<uint16_t>(job.q), query, job.queries);
      T::template load<kStepQueries>(to + T::bytes(kStepQueries), h.rows<uint16_t>(job.d_out),
                                     query, job.queries);
      // lse, then delta.
      const int word = threadIdx.x % kStepQueries;
      if (threadIdx.x < 2 * kStepQueries) {
        const bool there = query + word < job.queries;
        const float* from = h.statistics(job, threadIdx.x < kStepQueries ? job.lse : job.delta);
        copy_word(to + 2 * T::bytes(kStepQueries) + threadIdx.x * 4,
                  from + (there ? query + word : 0), there);
      }
    }
    commit_pieces();
  };
  T::template load<kOwnKeys>(k_tile, h.rows<uint16_t>(job.k), first_key, job.keys);
  T::template load<kOwnKeys>(v_tile, h.rows<uint16_t>(job.v), first_key, job.keys);
  load(0, 0);

  const int warp_row = threadIdx.x / 32 * 16;
  const float log2_scale = job.scale * kLog2E;
  Block<1, kC / 8> dk, dv;
  dk.clear();
  dv.clear();
  int64_t i = first;  // the step's first query
  for (int64_t n = 0; n < steps * job.heads; ++n) {
    wait_for_pieces<0>();
    __syncthreads();
    load(n + 1, (n + 1) % 2);
    const uint32_t q_tile = stages + n % 2 * kStage, d_tile = q_tile + T::bytes(kStepQueries);
    Block<1, kStepQueries / 8> s, dp;
    s.clear();
    s.template add_rows_by_rows<kC>(k_tile, warp_row, q_tile);
    dp.clear();
    dp.template add_rows_by_rows<kC>(v_tile, warp_row, d_tile);
    const float* lse = shared_floats(d_tile + T::bytes(kStepQueries));
    // Starts ascend, so the start of the step's last query tells whether any begins behind the
    // first key.
    const bool edge = offset + i < first_key + kOwnKeys - 1 || i + kStepQueries > end ||
                      (starts && starts[i + kStepQueries - 1] > first_key);
    s.visit([&](int b, int j, int e, int row, int column) {
      float &p = s.v[b][j][e], &d = dp.v[b][j][e];
      p = exp2_of(fmaf(p, log2_scale, -lse[column] * kLog2E));
      d = job.scale * p * (d - lse[kStepQueries + column]);
      if (!edge) return;
      const int64_t key = first_key + warp_row + row, query = i + column;
      if (query >= job.queries || key > offset + query || (starts && key < starts[query]))
        p = d = 0;
    });
    uint32_t operand[1][kStepQueries / 16][4];
    s.to_operand(operand);
    dv.template add_product<kStepQueries>(operand, d_tile);
    dp.to_operand(operand);
    dk.template add_product<kStepQueries>(operand, q_tile);
    i = i + kStepQueries < end ? i + kStepQueries : first;
  }
  h.head = 0;
  const auto one = [](int, int) { return 1.0f; };
  dk.store(h.rows<uint16_t>(job.dk), first_key + warp_row, job.keys, one);
  dv.store(h.rows<uint16_t>(job.dv), first_key + warp_row, job.keys, one);
}

}  // namespace

AttentionStart tile_attention_start(const AttentionKernel& kernel, const AttentionJob& job) {
  const int64_t groups = job.sequences * job.groups, heads = groups * job.heads;
  return start_of<kTileAttention>(kernel, [&]<AttentionKernel k>() -> AttentionStart {
    using T = Tiles<k.head_dim>;
    if constexpr (k.pass == AttentionPass::kForward) {
      return {attend_tiles<k.head_dim>,
              {heads * blocks_for(job.queries, kForwardQueries), kThreads,
               T::bytes(kForwardQueries + 2 * kForwardKeys)}};
    } else if constexpr (k.pass == AttentionPass::kDots) {
      return {dot_rows<k.head_dim>, {blocks_for(heads * job.queries, kWarps), kThreads}};
    } else if constexpr (k.pass == AttentionPass::kQueryGradient) {
      return {query_gradient<k.head_dim>,
              {heads * blocks_for(job.queries, kGradientQueries), kThreads,
               T::bytes(2 * kGradientQueries + 4 * kGradientKeys)}};
    } else {
      return {key_gradient<k.head_dim>,
              {groups * blocks_for(job.keys, kOwnKeys), kThreads,
               T::bytes(2 * kOwnKeys) + 2 * T::step_bytes()}};
    }
  });
}

}  // namespace moiety::nn
