// What the kernel of router_products.h is made of: shared memory, barriers, and the warps that load.
#pragma once

#include "moiety/gemm/sm90/tensor_map.cuh"
#include "moiety/gemm/sm90/wgmma.cuh"

namespace moiety::gemm::sm90 {

constexpr int kBox = 64 * 128;  // bytes of 64 rows of 128, the unit of copies
constexpr int kTokens = 64, kColumns = 128;

// Shared memory: w, stages, and buffers for addends and results. With kSums two warp groups sum rows,
// to bfloat16, through places of their own; their time leaves less to stages.
template <int kColumnsOfPiece, bool kSumsRows>
struct RouterLayout {
  static constexpr int kWidth = kColumnsOfPiece;
  static constexpr bool kSums = kSumsRows;
  static constexpr int kBlocks = kWidth / 64;     // of 64 experts
  static constexpr int kLoaders = kSums ? 2 : 1;  // warp groups
  static constexpr int kThreads = (kLoaders + 1 + kBlocks) * kWarpGroup;
  static constexpr int kW = kColumns / 64 * kWidth * 128;
  static constexpr int kPieces = 3 * kBlocks * kBox;
  static constexpr int kStage = kPieces + kColumns / 64 * kBox;
  static constexpr int kStages = (kBlocks == 1 ? 3 : 2) - kSums;
  static constexpr int kAddend = kColumns / (kSums ? 64 : 32) * kBox;
  static constexpr int kBuffers = 2;
  static constexpr int kBuffersAt = kW + kStages * kStage;
  static constexpr int kRingAt = kBuffersAt + kBuffers * kAddend;
  static constexpr int kRing = 3;  // groups of eight octets of a thread
  static constexpr int kBarriers = kRingAt + kSums * kRing * 8 * kLoaders * kWarpGroup * 16;
  static constexpr int kBytes = kBarriers + 8 * (1 + 2 * kStages + 2 * kBuffers);
};

struct RouterMaps {
  CUtensorMap pieces, h, w, addend, dh;
};

// The addend as sums of rows.
struct RouterRows {
  const char* rows;
  int64_t stride;        // bytes
  const int32_t* slots;  // [T, topk]
  int64_t tokens;
  int topk;
};

struct RouterSlices {
  int64_t columns, tiles, each;  // blocks of columns; tiles of tokens, and those of a slice
  int experts, model;
  bool adds;
  float* sums;
  RouterRows rows;
};

// A place in a ring of stages or buffers.
template <int kSize>
struct Turn {
  int at = 0, phase = 0;
  __device__ void next() {
    if (++at == kSize) {
      at = 0;
      phase ^= 1;
    }
  }
};

// What all roles of a block know.
template <class Layout>
struct RouterBlock {
  using L = Layout;
  const RouterMaps& maps;
  const RouterSlices& p;
  uint32_t base;
  int column, slice, first, end;  // tiles

  __device__ RouterBlock(const RouterMaps& m, const RouterSlices& s, uint32_t memory)
      : maps(m), p(s), base(memory) {
    slice = static_cast<int>(blockIdx.x / p.columns);
    column = static_cast<int>(blockIdx.x - slice * p.columns) * kColumns;
    first = static_cast<int>(slice * p.each);
    end = static_cast<int>(min(first + p.each, p.tiles));
  }
  __device__ uint32_t w_full() const { return base + L::kBarriers; }
  __device__ uint32_t full(int stage) const { return w_full() + 8 + 16 * stage; }
  __device__ uint32_t empty(int stage) const { return full(stage) + 8; }
  __device__ uint32_t buffer_full(int i) const { return full(L::kStages) + 16 * i; }
  __device__ uint32_t buffer_empty(int i) const { return buffer_full(i) + 8; }
  __device__ uint32_t stage(int i) const { return base + L::kW + i * L::kStage; }
  __device__ uint32_t buffer(int i) const { return base + L::kBuffersAt + i * L::kAddend; }

  __device__ void init() const {
    barrier_init(w_full(), 1);
    for (int i = 0; i < L::kStages; ++i) {
      barrier_init(full(i), 1);
      barrier_init(empty(i), (1 + L::kBlocks) * kWarpGroup / 32);
    }
    for (int i = 0; i < L::kBuffers; ++i) {
      barrier_init(buffer_full(i), L::kSums ? L::kLoaders * kWarpGroup / 32 : 1);
      barrier_init(buffer_empty(i), 1);
    }
    barrier_init_fence();
  }

  __device__ void load_w() const {
    barrier_arrive_expecting(w_full(), L::kW);
    for (int c = 0; c < kColumns / 64; ++c) {
      load_tile(base + c * L::kWidth * 128, maps.w, w_full(), {column + 64 * c, 0, 0, 0});
    }
  }
  // One thread calls it for all tiles in turn; those that do not exist are passed over.
  __device__ void load_stage(int tile, Turn<L::kStages>& turn) const {
    if (tile >= end) return;
    barrier_wait(empty(turn.at), turn.phase ^ 1);
    const uint32_t arrived = full(turn.at), to = stage(turn.at);
    barrier_arrive_expecting(arrived, L::kStage);
    for (int i = 0; i < 3 * L::kBlocks; ++i) {
      load_tile(to + i * kBox, maps.pieces, arrived, {64 * i, tile * kTokens, 0, 0});
    }
    for (int c = 0; c < kColumns / 64; ++c) {
      load_tile(to + L::kPieces + c * kBox, maps.h, arrived,
                {column + 64 * c, tile * kTokens, 0, 0});
    }
    turn.next();
  }
  __device__ void load_addends() const {
    Turn<L::kBuffers> turn;
    for (int tile = first; tile < end; ++tile, turn.next()) {
      barrier_wait(buffer_empty(turn.at), turn.phase ^ 1);
      const uint32_t arrived = buffer_full(turn.at);
      if (!p.adds) {
        barrier_arrive(arrived);
        continue;
      }
      barrier_arrive_expecting(arrived, L::kAddend);
      for (int c = 0; c < kColumns / 32; ++c) {
        load_tile(buffer(turn.at) + c * kBox, maps.addend, arrived,
                  {column + 32 * c, tile * kTokens, 0, 0});
      }
    }
  }
  __device__ void release(int stage) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(empty(stage));
  }
};

}  // namespace moiety::gemm::sm90
