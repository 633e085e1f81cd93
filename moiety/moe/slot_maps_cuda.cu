// The maps of slots on a GPU: threads have pairs, those behind them slots without a token.
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

}  // namespace

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
