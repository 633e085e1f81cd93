// The kernel of fused.h: that of grouped_sm90.cuh, whose third warp group has one warp that loads and
// three that compute the activation of a tile while the next one is multiplied.
#pragma once

#include "moiety/formats/octet.cuh"
#include "moiety/gemm/sm90/fused_loader.cuh"

namespace moiety::gemm::sm90 {

// What a group that multiplies has stored is in memory, and its rows may be read.
__device__ __forceinline__ uint32_t stored_barrier(uint32_t first, int group) {
  return first + group * 16;
}
// They have been read, and the group may say so of the next tile.
__device__ __forceinline__ uint32_t taken_barrier(uint32_t first, int group) {
  return first + group * 16 + 8;
}

// Stores 64 rows of a tile as bfloat16, and tells when they have arrived.
template <GemmOp kOp, class L>
class FusedStorer {
 public:
  static constexpr int kRound = L::kRound, kRounds = L::kBuffers / kRound;
  static constexpr int kHeld = kFusedColumns / 2, kBoxes = kFusedColumns / 64;

  __device__ FusedStorer(const TileGemm& g, const FusedMaps& maps, uint32_t base, int group)
      : g_(g),
        maps_(maps),
        buffers_(base + L::kStore + group * L::kBuffers * kPiece),
        barriers_(base + L::kHandOver),
        group_(group),
        warp_(threadIdx.x % kWarpGroup / 32),
        lane_(threadIdx.x % 32) {}

  __device__ void store(const Tile& t, float (&d)[kHeld]) {
    if (kOp == GemmOp::kTN && g_.epilogue.bias) add_bias(t, d);
    const int row = 16 * warp_ + lane_ % 16;
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      if (box % kRound == 0) {
        if (threadIdx.x % kWarpGroup == 0) wait_stores_read<kRounds - 1>();
        meet(1 + group_, kWarpGroup);
      }
      const uint32_t to = buffers_ + (round_ * kRound + box % kRound) * kPiece;
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        const int i = (box * 8 + j) * 4;
        store_matrices(to + row * 128 + ((j + lane_ / 16) ^ row % 8) * 16,
                       bf16_word(d[i], d[i + 1]), bf16_word(d[i + 2], d[i + 3]),
                       bf16_word(d[i + 4], d[i + 5]), bf16_word(d[i + 6], d[i + 7]));
      }
      if (box % kRound == kRound - 1) send(t, box);
    }
  }

  // Once for every tile, while the next is multiplied: what is stored of it will be read.
  __device__ void hand_over() {
    if (threadIdx.x % kWarpGroup == 0) {
      wait_stores<0>();
      if (handed_over_ > 0) {
        barrier_wait(taken_barrier(barriers_, group_), (handed_over_ - 1) & 1);
      }
      barrier_arrive(stored_barrier(barriers_, group_));
    }
    ++handed_over_;
  }

 private:
  __device__ void send(const Tile& t, int last) {
    fence_for_engines();
    meet(1 + group_, kWarpGroup);
    const uint32_t from = buffers_ + round_ * kRound * kPiece;
    round_ = (round_ + 1) % kRounds;
    if (threadIdx.x % kWarpGroup != 0) return;
    const int row = t.begin + t.row + 64 * group_, rows = min(t.live - 64 * group_, 64);
    for (int i = 0; i < kRound; ++i) {
      const int box = last - kRound + 1 + i;
      // The second half of a tile of pairs has columns, and a map, of its own.
      const bool second = box >= kBoxes / 2 && maps_.pairs > 0;
      const int column =
          maps_.pairs > 0 ? t.column / 2 + box % (kBoxes / 2) * 64 : t.column + box * 64;
      store_tile(second ? maps_.second : maps_.products.out, from + i * kPiece,
                 ragged_place(column, row, rows));
    }
    commit_stores();
  }

  __device__ void add_bias(const Tile& t, float (&d)[kHeld]) const {
    const auto* bias =
        static_cast<const uint16_t*>(g_.epilogue.bias) + (g_.groups.first + t.group) * g_.n;
#pragma unroll
    for (int j = 0; j < kFusedColumns / 8; ++j) {
      const int local = 8 * j + lane_ % 4 * 2;
      int column = t.column + local;
      bool live = column < g_.n;
      if (maps_.pairs > 0) {
        const int f = t.column / 2 + local % (kFusedColumns / 2);
        live = f < maps_.pairs;
        column = f + (local >= kFusedColumns / 2 ? static_cast<int>(maps_.pairs) : 0);
      }
      if (!live) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float b = __uint_as_float(uint32_t{bias[column + i]} << 16);
        d[4 * j + i] = __fadd_rn(d[4 * j + i], b);
        d[4 * j + 2 + i] = __fadd_rn(d[4 * j + 2 + i], b);
      }
    }
  }

  const TileGemm& g_;
  const FusedMaps& maps_;
  uint32_t buffers_, barriers_;
  int group_, warp_, lane_, round_ = 0, handed_over_ = 0;
};

// As multiply_tiles of grouped_sm90.cuh.
template <GemmOp kOp, class L>
__device__ void multiply_and_hand_over(const TileGemm& g, const FusedMaps& maps, uint32_t base,
                                       const Tile* tiles, int group) {
  constexpr bool kBTurned = kOp != GemmOp::kTN;
  constexpr int kBStep = kBTurned ? 16 * 128 : 32;
  constexpr int kArrival = 4;  // steps until what was stored will have arrived
  Ring<L> ring{base}, last{base};
  FusedStorer<kOp, L> storer(g, maps, base, group);
  const auto release = [&] {
    if (threadIdx.x % 32 == 0) barrier_arrive(last.empty());
    last.next();
  };
  for (int n = 0;; ++n) {
    barrier_wait(ring.full(), ring.phase);
    const Tile t = tiles[n % L::kTilesAhead];
    if (t.group < 0) {
      if (n > 0) storer.hand_over();
      storer.hand_over();  // of the end
      return;
    }
    const bool live = t.live > 64 * group;
    const int arrival = n > 0 ? min(kArrival, t.steps - 1) : -1;
    float d[kFusedColumns / 2];
    for (int step = 0; step < t.steps; ++step) {
      if (step > 0) barrier_wait(ring.full(), ring.phase);
      if (live) {
        if (L::kArrivals > 1) fence_for_engines();  // rows that threads have copied
        products_begin();
#pragma unroll
        for (int k = 0; k < kDepth / 16; ++k) {
          multiply<false, kBTurned>(d, operand(ring.a() + group * kPiece + k * 32, kPiece),
                                    operand(ring.b() + k * kBStep, kPiece), step > 0 || k > 0);
        }
        products_commit();
        if (step == arrival) storer.hand_over();
        products_wait<1>();
      } else if (step == arrival) {
        storer.hand_over();
      }
      ring.next();
      if (step > 0) release();
    }
    products_wait<0>();
    release();
    if (live) storer.store(t, d);
  }
}

// Reads past the caches of the multiprocessor, which do not know of the copy engine's stores.
__device__ __forceinline__ Octet<bf16> read_octet(const bf16* p) {
  const uint4 v = __ldcg(reinterpret_cast<const uint4*>(p));
  return {{v.x, v.y, v.z, v.w}};
}
__device__ __forceinline__ void write_octet(bf16* p, const float (&v)[kOctet]) {
  store_octet<true>(p, round_octet<bf16>(v), kOctet);
}

constexpr int kActivators = kWarpGroup - 32;  // threads: all but the warp that loads

// The kinds of activations that the compiler knows apart: kSwiglu is a GLU without limit, offset
// and alpha.
enum class FusedKind { kSwiglu, kGlu, kSquaredRelu };

// 64 rows of a tile. Threads have octets of columns.
template <FusedKind kKind>
class Activator {
 public:
  __device__ Activator(const ActivationBlock& block, float* segments)
      : block_(block), segments_(segments), thread_(threadIdx.x % kWarpGroup - 32) {}

  // `column` is the first of F, `row` the first row in the buffers, `rows` are live.
  __device__ void forward(int column, int64_t row, int rows) const {
    constexpr int kOctets = (kPaired ? kFusedColumns / 2 : kFusedColumns) / kOctet;
    constexpr int kStep = kActivators / kOctets, kAhead = 4;
    const int f = column + thread_ % kOctets * kOctet;
    if (f >= block_.ffn) return;
    const auto* h = static_cast<const bf16*>(block_.h) + row * block_.h_stride + f;
    auto* a = static_cast<bf16*>(block_.a) + row * block_.a_stride + f;
    for (int first = thread_ / kOctets; first < rows; first += kStep * kAhead) {
      Octet<bf16> x[kAhead], b[kAhead];
      float p[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int r = min(first + i * kStep, rows - 1);
        x[i] = read_octet(h + r * block_.h_stride);
        if constexpr (kPaired) b[i] = read_octet(h + r * block_.h_stride + block_.ffn);
        p[i] = prob(row + r);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int r = first + i * kStep;
        float v[kOctet];
#pragma unroll
        for (int c = 0; c < kOctet; ++c) v[c] = value(x[i][c], b[i][c]) * p[i];
        if (r < rows) write_octet(a + r * block_.a_stride, v);
      }
    }
  }

  // A warp has a row of the tile at a time.
  __device__ void backward(int column, int64_t row, int rows) const {
    constexpr int kStep = kActivators / 32;
    const int f = column + thread_ % 32 * kOctet;
    const bool live = f < block_.ffn;
    for (int r = thread_ / 32; r < rows; r += kStep) {
      const int64_t at = row + r;
      Octet<bf16> x, b, da;
      const float p = prob(at);
      if (live) {
        const auto* h = static_cast<const bf16*>(block_.h) + at * block_.h_stride + f;
        x = read_octet(h);
        if constexpr (kPaired) b = read_octet(h + block_.ffn);
        da = read_octet(static_cast<const bf16*>(block_.da) + at * block_.da_stride + f);
      }
      float y[kOctet], v[kOctet], w[kOctet];
#pragma unroll
      for (int c = 0; c < kOctet; ++c) {
        const float t = da[c] * p;
        if constexpr (kPaired) {
          const ActivationGradient<float> g = glu_gradient(activation(), x[c], b[c], t);
          y[c] = g.y;
          v[c] = g.a;
          w[c] = g.b;
        } else {
          y[c] = squared_relu(x[c]);
          v[c] = squared_relu_gradient(x[c], t);
        }
      }
      if (segments_) store_segments(da, y, f, at);
      if (!live) continue;
      auto* dh = static_cast<bf16*>(block_.dh) + at * block_.dh_stride + f;
      write_octet(dh, v);
      if constexpr (kPaired) write_octet(dh + block_.ffn, w);
      if (!block_.a) continue;
#pragma unroll
      for (int c = 0; c < kOctet; ++c) v[c] = y[c] * p;
      write_octet(static_cast<bf16*>(block_.a) + at * block_.a_stride + f, v);
    }
  }

 private:
  static constexpr bool kPaired = kKind != FusedKind::kSquaredRelu;

  __device__ Activation activation() const {
    return kKind == FusedKind::kSwiglu ? swiglu() : block_.activation;
  }
  __device__ float value(float a, float b) const {
    return kPaired ? glu(activation(), a, b) : squared_relu(a);
  }
  // x * 1 is x, also of a NaN as far as its payload is concerned, which is free.
  __device__ float prob(int64_t row) const {
    return block_.prob ? static_cast<const float*>(block_.prob)[row] : 1;
  }

  // The segments of the canonical row dot (swiglu.h): eight lanes are one, through which its four
  // partial sums go. Columns that do not exist are 0 and change no bit.
  __device__ void store_segments(const Octet<bf16>& da, const float (&y)[kOctet], int f,
                                 int64_t row) const {
    const int place = thread_ % 8;
    float part[4] = {};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        if (place == j) {
          part[q] = __fmaf_rn(da[2 * q], y[2 * q], part[q]);
          part[q] = __fmaf_rn(da[2 * q + 1], y[2 * q + 1], part[q]);
        }
        part[q] = __shfl_sync(~0u, part[q], j, 8);
      }
    }
    if (place != 0 || f >= block_.ffn) return;
    segments_[row * segment_count(block_.ffn) + f / kDotSegment] =
        (part[0] + part[1]) + (part[2] + part[3]);
  }

  const ActivationBlock& block_;
  float* segments_;
  int thread_;
};

// The warps that compute activations.
template <bool kBackward, FusedKind kKind, class L>
__device__ void activate_tiles(const ActivationBlock& block, float* segments, bool pairs,
                               uint32_t base, const Tile* tiles) {
  const Activator<kKind> activator(block, segments);
  const uint32_t barriers = base + L::kHandOver;
  for (int n = 0;; ++n) {
    for (int group = 0; group < kGroups; ++group) {
      barrier_wait(stored_barrier(barriers, group), n & 1);
      const Tile t = tiles[n % L::kTilesAhead];
      if (t.group < 0) return;
      const int64_t row = int64_t{t.begin} + t.row + 64 * group;
      const int rows = min(t.live - 64 * group, 64);
      if (rows > 0) {
        if constexpr (kBackward) {
          activator.backward(t.column, row, rows);
        } else {
          activator.forward(pairs ? t.column / 2 : t.column, row, rows);
        }
      }
      __syncwarp();
      if (threadIdx.x % 32 == 0) barrier_arrive(taken_barrier(barriers, group));
    }
  }
}

template <GemmOp kOp, bool kGathers>
__global__ void __launch_bounds__(3 * kWarpGroup, 1)
    fused_products(const __grid_constant__ FusedMaps maps, const __grid_constant__ TileGemm g,
                   const __grid_constant__ FusedActivation f) {
  constexpr bool kBackward = kOp == GemmOp::kNN;
  using L = FusedLayout<kOp, kGathers>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t base = shared_address(memory);
  auto* tiles = reinterpret_cast<Tile*>(memory + L::kTiles);
  auto* table = reinterpret_cast<GroupTable*>(memory + L::kTable);
  if (threadIdx.x == 0) {
    for (int s = 0; s < L::kStages; ++s) {
      barrier_init(base + L::kBarriers + s * 16, L::kArrivals);
      barrier_init(base + L::kBarriers + s * 16 + 8, kGroups * kWarpGroup / 32);
    }
    for (int i = 0; i < kGroups; ++i) {
      barrier_init(stored_barrier(base + L::kHandOver, i), 1);
      barrier_init(taken_barrier(base + L::kHandOver, i), kActivators / 32);
    }
    barrier_init_fence();
  }
  table->fill(g);
  __syncthreads();
  const int role = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpGroup, 0);
  if (role < kGroups) {
    take_registers<176>();
    multiply_and_hand_over<kOp, L>(g, maps, base, tiles, role);
    return;
  }
  give_registers<152>();  // as many, for three groups, as they are launched with: 3 * 168
  if (threadIdx.x % kWarpGroup < 32) {
    if (!kGathers && threadIdx.x % 32 != 0) return;
    FusedLoader<kOp, kGathers> loader(g, maps, base);
    const TileWalk<kOp, kFusedColumns> walk(g, *table);
    int n = 0;
    for (int64_t index = blockIdx.x;; index += gridDim.x, ++n) {
      const Tile t = walk.at(index);
      if (threadIdx.x % 32 == 0) tiles[n % L::kTilesAhead] = t;
      if (t.group < 0) break;
      loader.tile(t);
    }
    loader.end();
  } else {
    const ActivationBlock& block = f.block;
    const bool plain = block.activation.alpha == 1 && block.activation.offset == 0 &&
                       block.activation.limit == swiglu().limit;
    const bool pairs = maps.pairs > 0;
    if (block.activation.kind == ActivationKind::kSquaredRelu) {
      activate_tiles<kBackward, FusedKind::kSquaredRelu, L>(block, f.segments, pairs, base, tiles);
    } else if (plain) {
      activate_tiles<kBackward, FusedKind::kSwiglu, L>(block, f.segments, pairs, base, tiles);
    } else {
      activate_tiles<kBackward, FusedKind::kGlu, L>(block, f.segments, pairs, base, tiles);
    }
  }
}

template <GemmOp kOp, bool kGathers>
FusedLaunch fused_launch_of() {
  return {fused_products<kOp, kGathers>, FusedLayout<kOp, kGathers>::kBytes};
}

}  // namespace moiety::gemm::sm90
