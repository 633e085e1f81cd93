// The kernel of grouped_sm90.h.
#pragma once

#include <bit>

#include "moiety/gemm/sm90/loader.cuh"
#include "moiety/gemm/sm90/storer.cuh"

namespace moiety::gemm::sm90 {

// 16 elements' products, the k-th ones of a step, of 64 rows of a tile.
template <GemmOp kOp, class L>
__device__ __forceinline__ void multiply_sixteen(float (&d)[L::kColumns / 2], uint32_t a,
                                                 uint32_t b, int k, bool add) {
  constexpr bool kATurned = kOp == GemmOp::kNT, kBTurned = kOp != GemmOp::kTN;
  constexpr int kAStep = kATurned ? 16 * 128 : 32, kBStep = kBTurned ? 16 * 128 : 32;
  multiply<kATurned, kBTurned>(d, operand(a, kPiece, k * kAStep), operand(b, kPiece, k * kBStep),
                               add);
}

// The n-th tile of the block. The lane that tells the block's loader when stages are free reads it and
// shows it to the others, since racecheck follows reads to arrivals of the same lane alone
// (docs/adr/0012). Kernels whose blocks work alone on rows in order lack the registers for that.
template <class L>
__device__ __forceinline__ Tile read_tile(const Tile* tiles, int n) {
  const Tile& t = tiles[n % kTilesAhead];
  if constexpr (!L::kGathers && !L::kInPairs) return t;
  struct Words {
    uint32_t of[sizeof(Tile) / 4];
  };
  Words words = {};
  if (threadIdx.x % 32 == blockIdx.x % L::kTogether) words = std::bit_cast<Words>(t);
#pragma unroll
  for (uint32_t& word : words.of) word = __reduce_or_sync(~0u, word);
  return std::bit_cast<Tile>(words);
}

// Says that the warp is done with a stage: to both blocks of a pair.
template <class L>
__device__ __forceinline__ void release_stage(Ring<L>& last) {
  const int lane = threadIdx.x % 32;
  if constexpr (L::kInPairs) {
    if (lane < kPair) barrier_arrive_at(last.empty(), lane);
  } else {
    if (lane == 0) barrier_arrive(last.empty());
  }
  last.next();
}

// Passes the stages of a tile that the group has no rows of, the first of which has come. All lanes
// of a warp have seen a stage before one says that the warp is done with it: those that multiply wait
// for each other anyhow.
template <class L>
__device__ __forceinline__ void pass_tile(Ring<L>& ring, int steps) {
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    if (step > 0) await_stage(ring);
    __syncwarp();
    release_stage(ring);
  }
}

// The products of a step in which the reduction ends, with `left` elements.
template <GemmOp kOp, class L>
__device__ __forceinline__ void multiply_last(float (&d)[L::kHalves][L::kColumns / 2],
                                              Ring<L>& ring, int group, bool first, int left) {
  if (!L::kGathers && !first) await_stage(ring);
  for (int k = 0; k == 0 || k * 16 < left; ++k) {
    products_begin();
#pragma unroll
    for (int half = 0; half < L::kHalves; ++half) {
      multiply_sixteen<kOp, L>(d[half], ring.a() + (L::kHalves * group + half) * kPiece, ring.b(),
                               k, !first || k > 0);
    }
  }
  products_commit();
  ring.next();
  products_wait<1>();
}

// The groups that multiply: half of the rows of every tile each, which `results` takes.
template <GemmOp kOp, class L, class Results>
__device__ void multiply_tiles(uint32_t base, const Tile* tiles, int group, Results& results) {
  Ring<L> ring{base}, last{base};
  const auto release = [&] { release_stage(last); };
  for (int n = 0;; ++n) {
    await_stage(ring);
    const Tile t = read_tile<L>(tiles, n);
    const bool live = t.live > 64 * L::kHalves * group;
    bool beside = false;  // whether results that wait leave beside this tile's products
    if constexpr (Results::kWaiting > 0) {
      beside = live && results.waits() && t.steps > Results::kWaiting + 1;
      if (!beside) results.leave_all();
    }
    if (t.group < 0) return;
    if (!live) {
      pass_tile(ring, t.steps);
      last = ring;
      continue;
    }
    results.expect(t, L::kHalves * group);
    float d[L::kHalves][L::kColumns / 2];
    int step = 0;
    // The products of a step, and what is done beside them.
    const auto multiply = [&](auto&& other) {
      if (!L::kGathers && step > 0) await_stage(ring);
      products_begin();
#pragma unroll
      for (int half = 0; half < L::kHalves; ++half) {
#pragma unroll
        for (int k = 0; k < kDepth / 16; ++k) {
          multiply_sixteen<kOp, L>(d[half], ring.a() + (L::kHalves * group + half) * kPiece,
                                   ring.b(), k, step > 0 || k > 0);
        }
      }
      products_commit();
      ring.next();
      other();
      if (L::kGathers && step + 1 < t.steps) await_stage(ring);  // while these products run
      products_wait<1>();
      if (step > 0) release();
      ++step;
    };
    if constexpr (Results::kWaiting > 0) {
      if (beside) {
        multiply([] {});
        results.leave_beside(multiply, t.steps - 1);
      }
    }
    // Steps that no 16 elements are missing from.
    const int whole = kOp == GemmOp::kNT ? (t.depth + 15) / kDepth : t.steps;
    while (step < whole) multiply([] {});
    if (kOp == GemmOp::kNT && step < t.steps) {
      multiply_last<kOp, L>(d, ring, group, step == 0, t.depth - step * kDepth);
      if (step > 0) release();
    }
    products_wait<0>();
    release();
    results.template store<0>(t, L::kHalves * group, d[0]);
    if constexpr (L::kHalves > 1) {
      const int second = L::kHalves * group + 1;
      if (t.live <= 64 * second) continue;
      results.expect(t, second);
      results.template store<1>(t, second, d[1]);
    }
  }
}

// Loads the block's tiles in turn. `first`: the thread tells those who multiply of them.
template <GemmOp kOp, class L, class TileLoader>
__device__ __forceinline__ void load_tiles(TileLoader& loader, const TileGemm& g, Tile* tiles,
                                           const GroupTable& table, bool first) {
  const WalkOf<kOp, L> walk(g, table);
  int64_t index = blockIdx.x / L::kTogether;
  Tile t = walk.at(index);
  loader.begin(t);
  for (int n = 0;; ++n) {
    if (first) tiles[n % kTilesAhead] = t;
    __syncwarp();
    if (t.group < 0) break;
    const int64_t following = index + gridDim.x / L::kTogether;
    const Tile next = walk.at(following);
    if constexpr (L::kMeets) {
      if (walk.all_go_on(index)) loader.meet();  // and loads at once
    }
    loader.tile(t, next);
    t = next;
    index = following;
  }
  loader.end();
}

// A group that multiplies, and stores what it has.
template <GemmOp kOp, class L>
struct Multiplier {
  __device__ static void run(const Maps& maps, const TileGemm& g, uint32_t base, const Tile* tiles,
                             int group) {
    Storer<kOp, L::kColumns, L> results(g, maps, base, group);
    multiply_tiles<kOp, L>(base, tiles, group, results);
    results.end();
  }
};

template <GemmOp kOp, Gathered kGathered, class L, class Multiplies = Multiplier<kOp, L>>
__device__ __forceinline__ void run_products(const Maps& maps, const TileGemm& g) {
  constexpr bool kGathers = L::kGathers;
  // A group that asks for more registers than the block has would wait for ever.
  static_assert(kGroups * kWarpGroup * L::kMultiplyRegisters + L::kLoaders * L::kLoadRegisters <=
                65536 / L::kThreads / 8 * 8 * L::kThreads);
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t base = shared_address(memory);
  auto* tiles = reinterpret_cast<Tile*>(memory + L::kTiles);
  auto* table = reinterpret_cast<GroupTable*>(memory + L::kTable);
  if (threadIdx.x == 0) {
    init_stages<L>(base);
    barrier_init_fence();
  }
  fill_table<kOp, L>(*table, g);
  __syncthreads();
  if constexpr (L::kInPairs) cluster_meet();
  const int role = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpGroup, 0);
  if (role >= kGroups) {
    give_registers<L::kLoadRegisters>();
    const bool first = threadIdx.x == kGroups * kWarpGroup;
    if (!kGathers && threadIdx.x >= kGroups * kWarpGroup + 32) return;
    Loader<kOp, L::kColumns, kGathered, L> loader(g, maps, base);
    load_tiles<kOp, L>(loader, g, tiles, *table, first);
  } else {
    take_registers<L::kMultiplyRegisters>();
    Multiplies::run(maps, g, base, tiles, role);
  }
}

template <GemmOp kOp, int kColumns, Gathered kGathered>
__global__ void __launch_bounds__(Layout<kOp, kColumns, kGathered>::kThreads, 1)
    grouped_products(const __grid_constant__ Maps maps, const __grid_constant__ TileGemm g) {
  run_products<kOp, kGathered, Layout<kOp, kColumns, kGathered>>(maps, g);
}
// FC1's weight gradient as its transpose, whose rows are columns of the gathered ones: so tiles have
// few gathered columns, and 256 of the others in one product (docs/adr/0041).
template <int kColumns>
__global__ void __launch_bounds__(
    Layout<GemmOp::kNT, kColumns, Gathered::kA, false, true>::kThreads, 1)
    grouped_transposed(const __grid_constant__ Maps maps, const __grid_constant__ TileGemm g) {
  run_products<GemmOp::kNT, Gathered::kA, Layout<GemmOp::kNT, kColumns, Gathered::kA, false, true>>(
      maps, g);
}
template <GemmOp kOp, int kColumns, Gathered kGathered>
__global__ void __launch_bounds__(Layout<kOp, kColumns, kGathered, true>::kThreads, 1)
    __cluster_dims__(kPair, 1, 1)
        grouped_pairs(const __grid_constant__ Maps maps, const __grid_constant__ TileGemm g) {
  run_products<kOp, kGathered, Layout<kOp, kColumns, kGathered, true>>(maps, g);
  __syncwarp();
  cluster_meet();  // the other block's loads arrive in this one
}

template <GemmOp kOp, int kColumns, Gathered kGathered>
KernelLaunch launch_of() {
  using L = Layout<kOp, kColumns, kGathered>;
  return {{kOp, kColumns, kGathered},
          grouped_products<kOp, kColumns, kGathered>,
          L::kThreads,
          L::kBytes};
}
template <GemmOp kOp, int kColumns, Gathered kGathered>
KernelLaunch launch_of_pairs() {
  using L = Layout<kOp, kColumns, kGathered, true>;
  return {{kOp, kColumns, kGathered, false, true},
          grouped_pairs<kOp, kColumns, kGathered>,
          L::kThreads,
          L::kBytes};
}

template <int kColumns>
KernelLaunch launch_of_transposed() {
  using L = Layout<GemmOp::kNT, kColumns, Gathered::kA, false, true>;
  return {{.op = GemmOp::kNT, .columns = kColumns, .gathered = Gathered::kB, .transposed = true},
          grouped_transposed<kColumns>,
          L::kThreads,
          L::kBytes};
}

}  // namespace moiety::gemm::sm90
