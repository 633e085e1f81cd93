// The kernel of router_products.h. Of a block's warp groups the first loads: one warp pieces and
// rows of h into a ring of stages, another the addend into buffers of its own. The second multiplies
// by w, which stays in shared memory, adds, and stores through the addend's buffer. The others have
// 64 experts each of the weights' gradient, which stays in registers until the slice ends.
#include "moiety/base/launch.cuh"
#include "moiety/formats/octet.cuh"
#include "moiety/gemm/router_products.h"
#include "moiety/gemm/sm90/router_sums.cuh"

namespace moiety::gemm {
namespace sm90 {
namespace {

// d += the addend, which lies in boxes of 32 columns.
__device__ void add_boxes(float (&d)[kColumns / 2], uint32_t from) {
  const int warp = threadIdx.x % kWarpGroup / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * warp + 8 * half + lane / 4, piece = j % 4 * 2 + lane % 4 / 2;
      float2 v;
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                   : "=f"(v.x), "=f"(v.y)
                   : "r"(from + j / 4 * kBox + row * 128 + (piece ^ row % 8) * 16 + lane % 2 * 8)
                   : "memory");
      d[4 * j + 2 * half] += v.x;
      d[4 * j + 2 * half + 1] += v.y;
    }
  }
}

// Where four matrices of 8 x 8 elements of bfloat16 lie, in boxes of 64 columns: from column 8j of a
// box on, 16 columns of the warp's rows.
__device__ uint32_t matrices(uint32_t boxes, int box, int j) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % kWarpGroup / 32 * 16 + lane % 16;
  return boxes + box * kBox + row * 128 + ((j + lane / 16) ^ row % 8) * 16;
}

// d += what lies there, of the warp's rows.
__device__ void add_matrices(float (&d)[kColumns / 2], uint32_t from) {
#pragma unroll
  for (int box = 0; box < kColumns / 64; ++box) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      uint32_t x[4];
      load_matrices(x, matrices(from, box, j));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        d[32 * box + 4 * j + 2 * i] += low_bf16(x[i]);
        d[32 * box + 4 * j + 2 * i + 1] += high_bf16(x[i]);
      }
    }
  }
}

// Rounds d, the warp's rows.
__device__ void write_matrices(const float (&d)[kColumns / 2], uint32_t to) {
#pragma unroll
  for (int box = 0; box < kColumns / 64; ++box) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const float* x = &d[32 * box + 4 * j];
      store_matrices(matrices(to, box, j), bf16_word(x[0], x[1]), bf16_word(x[2], x[3]),
                     bf16_word(x[4], x[5]), bf16_word(x[6], x[7]));
    }
  }
}

template <class L>
__device__ void multiply_rows(const RouterBlock<L>& b) {
  const bool sends = threadIdx.x % kWarpGroup == 0;
  Turn<L::kStages> turn;
  Turn<L::kBuffers> out;
  int sent = -1;  // the buffer that is being stored
  barrier_wait(b.w_full(), 0);
  for (int tile = b.first; tile < b.end; ++tile, turn.next(), out.next()) {
    barrier_wait(b.full(turn.at), turn.phase);
    float d[kColumns / 2];
    products_begin();
#pragma unroll
    for (int piece = 2; piece >= 0; --piece) {
#pragma unroll
      for (int k = 0; k < L::kWidth / 16; ++k) {
        const uint32_t a = b.stage(turn.at) + (piece * L::kBlocks + k / 4) * kBox + k % 4 * 32;
        multiply<false, true>(d, operand(a, kBox), operand(b.base + k * 16 * 128, L::kWidth * 128),
                              piece < 2 || k > 0);
      }
    }
    products_commit();
    if (sends && sent >= 0) {
      wait_stores_read<0>();
      barrier_arrive(b.buffer_empty(sent));
    }
    products_wait<0>();
    b.release(turn.at);
    barrier_wait(b.buffer_full(out.at), out.phase);
    const uint32_t here = b.buffer(out.at);
    if constexpr (L::kSums) {
      add_matrices(d, here);
    } else {
      if (b.p.adds) add_boxes(d, here);
      meet(1, kWarpGroup);  // all have read what is written over
    }
    write_matrices(d, here);
    fence_for_engines();
    meet(1, kWarpGroup);
    sent = out.at;
    if (!sends) continue;
    for (int c = 0; c < kColumns / 64 && b.column + 64 * c < b.p.model; ++c) {
      store_tile(b.maps.dh, here + c * kBox, {b.column + 64 * c, tile * kTokens, 0, 0});
    }
    commit_stores();
  }
  if (sends) wait_stores_read<0>();
}

template <class L>
__device__ void multiply_weights(const RouterBlock<L>& b, int group) {
  float d[kColumns / 2] = {};
  Turn<L::kStages> turn;
  for (int tile = b.first; tile < b.end; ++tile, turn.next()) {
    barrier_wait(b.full(turn.at), turn.phase);
    if (b.p.sums) {
      products_begin();
#pragma unroll
      for (int piece = 2; piece >= 0; --piece) {
#pragma unroll
        for (int k = 0; k < kTokens / 16; ++k) {
          const uint32_t a = b.stage(turn.at) + (piece * L::kBlocks + group) * kBox + k * 16 * 128;
          const uint32_t rows = b.stage(turn.at) + L::kPieces + k * 16 * 128;
          multiply<true, true>(d, operand(a, kBox), operand(rows, kBox), true);
        }
      }
      products_commit();
      products_wait<0>();
    }
    b.release(turn.at);
  }
  if (!b.p.sums) return;
  const int warp = threadIdx.x % kWarpGroup / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int expert = 64 * group + 16 * warp + 8 * half + lane / 4;
    if (expert >= b.p.experts) continue;
    float* to = b.p.sums + (int64_t{b.slice} * b.p.experts + expert) * b.p.model;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const int at = b.column + 8 * j + 2 * (lane % 4);
      if (at < b.p.model) {
        *reinterpret_cast<float2*>(to + at) = {d[4 * j + 2 * half], d[4 * j + 2 * half + 1]};
      }
    }
  }
}

template <class L>
__global__ void __launch_bounds__(L::kThreads, 1)
    router_products(const __grid_constant__ RouterMaps maps,
                    const __grid_constant__ RouterSlices slices) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const RouterBlock<L> block(maps, slices, shared_address(memory));
  if (threadIdx.x == 0) block.init();
  __syncthreads();
  const int role = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpGroup, 0);
  if (role == L::kLoaders) return multiply_rows(block);
  if (role > L::kLoaders) return multiply_weights(block, role - L::kLoaders - 1);
  cudaGridDependencySynchronize();
  if constexpr (L::kSums) {
    RowSummer<RouterBlock<L>>(block).run();
  } else if (threadIdx.x == 0) {
    block.load_w();
    Turn<L::kStages> turn;
    for (int tile = block.first; tile < block.end; ++tile) block.load_stage(tile, turn);
  } else if (threadIdx.x == 32) {
    block.load_addends();
  }
}

CUtensorMap map_of(const TensorView& x, int box_rows) {
  return matrix_map({.first = x.raw(),
                     .dtype = x.dtype(),
                     .rows = x.size(0),
                     .columns = x.size(1),
                     .row_stride = x.stride(0),
                     .stride = 16,
                     .groups = 1},
                    box_rows);
}

template <class L>
void start(const RouterMaps& maps, const RouterSlices& slices, int64_t blocks,
           const Stream& stream) {
  launch("router_backward: products", router_products<L>,
         {.blocks = blocks, .threads = L::kThreads, .shared_bytes = L::kBytes, .early = true},
         stream, maps, slices);
}

}  // namespace
}  // namespace sm90

void multiply_router(const RouterProducts& p, const Stream& stream) {
  using namespace sm90;
  const int64_t tokens = p.h_TD.size(0), model = p.h_TD.size(1), experts = p.w_ED.size(0);
  const int64_t width = router_width(experts), tiles = blocks_for(tokens, kTokens);
  const int64_t slices = router_slices(tokens, model);
  RouterMaps maps{.pieces = map_of(p.pieces_TX, 64),
                  .h = map_of(p.h_TD, 64),
                  .w = map_of(p.w_ED, static_cast<int>(width)),
                  .addend = {},
                  .dh = map_of(p.dh_TD, 64)};
  if (p.addend_TD.defined()) maps.addend = map_of(p.addend_TD, 64);
  const bool sums = p.rows_CD.defined();
  RouterSlices shape{.columns = blocks_for(model, kColumns),
                     .tiles = tiles,
                     .each = blocks_for(tiles, slices),
                     .experts = static_cast<int>(experts),
                     .model = static_cast<int>(model),
                     .adds = sums || p.addend_TD.defined(),
                     .sums = p.sums_SED.data<float>(),
                     .rows = {}};
  if (sums) {
    shape.rows = {.rows = static_cast<const char*>(p.rows_CD.raw()),
                  .stride = 2 * p.rows_CD.stride(0),
                  .slots = p.slot_TK.data<int32_t>(),
                  .tokens = tokens,
                  .topk = static_cast<int>(p.slot_TK.size(1))};
  }
  const auto run = [&]<int kWidth>() {
    const auto start_it =
        sums ? start<RouterLayout<kWidth, true>> : start<RouterLayout<kWidth, false>>;
    start_it(maps, shape, shape.columns * slices, stream);
  };
  width == 64 ? run.template operator()<64>() : run.template operator()<128>();
}

}  // namespace moiety::gemm
