// Rows to experts on a GPU: dispatch and, where it only copies, combine_backward. A warp has a
// piece of one token's row, which it reads once and writes to every slot of the token; warps behind
// those zero the rows that no token has.
#include <algorithm>

#include "moiety/base/launch.cuh"
#include "moiety/moe/exchange_cuda.h"
#include "moiety/moe/rows_device.cuh"

namespace moiety::moe {
namespace {

using device::kRowThreads;
using device::kRowWarps;

// One part of a payload's rows.
struct CopyParams {
  const std::byte *from, *weights;  // weights[t, k] go to `to.values`
  int64_t from_stride, weight_stride;
  uint32_t pieces;       // pieces of a row
  int64_t token_blocks;  // blocks of the grid that have tokens
  int64_t tokens;
  int topk;
  const int32_t* slot_TK;
  device::ZeroRows to;
};

template <class Unit>
constexpr int kUnits = sizeof(Unit) == 16 ? 2 : 4;  // units of a lane

template <class Unit>
__global__ void __launch_bounds__(kRowThreads) copy_part(const __grid_constant__ CopyParams p) {
  const int lane = threadIdx.x % 32;
  if (blockIdx.x >= p.token_blocks) {
    const int64_t block = blockIdx.x - p.token_blocks;
    return p.to.run<Unit>(block * kRowWarps + threadIdx.x / 32);
  }
  const device::Piece piece(blockIdx.x, p.pieces);
  if (piece.row >= p.tokens) return;
  device::TokenSlots slots(p.slot_TK, piece.row, p.topk);
  const int64_t units = p.to.bytes / int64_t{sizeof(Unit)};
  const int64_t first = int64_t{piece.piece} * (32 * kUnits<Unit>)+lane;
  const auto* from = reinterpret_cast<const Unit*>(p.from + piece.row * p.from_stride);
  Unit held[kUnits<Unit>];
#pragma unroll
  for (int i = 0; i < kUnits<Unit>; ++i) {
    if (first + 32 * i < units) held[i] = from[first + 32 * i];
  }
  if (piece.piece == 0 && p.to.values && slots.own() >= 0) {
    const auto* w =
        reinterpret_cast<const uint32_t*>(p.weights + piece.row * p.weight_stride) + lane;
    *reinterpret_cast<uint32_t*>(p.to.values + slots.own() * p.to.value_stride) = *w;
  }
  while (slots.more()) {
    auto* to = reinterpret_cast<Unit*>(p.to.data + slots.slot(slots.next()) * p.to.stride);
#pragma unroll
    for (int i = 0; i < kUnits<Unit>; ++i) {
      if (first + 32 * i < units) to[first + 32 * i] = held[i];
    }
  }
}

template <class Unit>
void launch_copy(CopyParams p, const Stream& stream) {
  const int64_t units = p.to.bytes / int64_t{sizeof(Unit)};
  p.pieces = static_cast<uint32_t>(blocks_for(units, 32 * kUnits<Unit>));
  p.token_blocks = blocks_for(p.tokens * p.pieces, kRowWarps);
  launch("ep copy_rows", copy_part<Unit>,
         {p.token_blocks + device::ZeroRows::blocks(p.to.capacity), kRowThreads}, stream, p);
}

// Launches with the widest unit that all rows are made of.
void launch_part(const CopyParams& p, const Stream& stream) {
  const auto all = reinterpret_cast<uintptr_t>(p.from) | reinterpret_cast<uintptr_t>(p.to.data) |
                   static_cast<uintptr_t>(p.from_stride | p.to.stride | p.to.bytes);
  if (all % 16 == 0) return launch_copy<uint4>(p, stream);
  if (all % 4 == 0) return launch_copy<uint32_t>(p, stream);
  if (all % 2 == 0) return launch_copy<uint16_t>(p, stream);
  launch_copy<uint8_t>(p, stream);
}

}  // namespace

void copy_rows_cuda(const EpPlan& plan, const SourceRows& x, const TensorView& w_TK,
                    const ExpertRows& rows, bool tail, const Stream& stream) {
  const auto part = [&](const Rows& from, const Rows& to, int64_t bytes, bool values) {
    if (bytes == 0) return;
    CopyParams p{};
    p.from = from[0];
    p.from_stride = from.stride();
    p.tokens = plan.tokens;
    p.topk = plan.topk;
    p.slot_TK = plan.slot_TK.data<int32_t>();
    p.to = device::ZeroRows::of(plan, tail);
    p.to.data = to[0];
    p.to.stride = to.stride();
    p.to.bytes = bytes;
    if (values) {
      const Rows w(w_TK);
      p.weights = w[0];
      p.weight_stride = w.stride();
      p.to.values = rows.values[0];
      p.to.value_stride = rows.values.stride();
    }
    launch_part(p, stream);
  };
  part(x.data, rows.data, x.parts.data, rows.has_values);
  part(x.scales, rows.scales.compact(), x.parts.scales, false);
  part(x.row_scale, rows.row_scale, x.parts.row_scale, false);
}

}  // namespace moiety::moe
