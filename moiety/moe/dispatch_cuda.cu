// Rows to experts on a GPU: dispatch and combine_backward. A warp has a piece of one token's row,
// which it reads once and writes to every slot of the token; warps behind those zero the rows that
// no token has.
#include <algorithm>

#include "moiety/base/launch.cuh"
#include "moiety/formats/octet.cuh"
#include "moiety/moe/exchange_cuda.h"
#include "moiety/moe/rows_device.cuh"

namespace moiety::moe {
namespace {

using device::kRowThreads;
using device::kRowWarps;
using device::kWarp;

// One part of a payload's rows.
struct CopyParams {
  const std::byte *from, *weights;  // weights[t, k], of `to.values`
  int64_t from_stride, weight_stride;
  uint32_t pieces;       // of a row
  int64_t token_blocks;  // blocks of the grid that have tokens
  int64_t tokens;
  int topk;
  const int32_t* slot_TK;
  device::ZeroRows to;
};

template <class Unit>
constexpr int kUnits = sizeof(Unit) == 16 ? 2 : 4;  // of a lane

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

// The widest unit that all rows are made of.
void launch_part(const CopyParams& p, const Stream& stream) {
  const auto all = reinterpret_cast<uintptr_t>(p.from) | reinterpret_cast<uintptr_t>(p.to.data) |
                   static_cast<uintptr_t>(p.from_stride | p.to.stride | p.to.bytes);
  if (all % 16 == 0) return launch_copy<uint4>(p, stream);
  if (all % 4 == 0) return launch_copy<uint32_t>(p, stream);
  if (all % 2 == 0) return launch_copy<uint16_t>(p, stream);
  launch_copy<uint8_t>(p, stream);
}

device::ZeroRows zero_rows(const EpPlan& plan, bool tail) {
  device::ZeroRows out{};
  out.slot_row = plan.slot_row.data<int32_t>();
  out.info = plan.info.data<int64_t>();
  out.capacity = plan.capacity;
  out.tail = tail;
  return out;
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
    p.to = zero_rows(plan, tail);
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

namespace {

struct ScaleParams {
  const std::byte *g, *y, *slot_w;  // y may be null
  int64_t g_stride, y_stride, w_stride, n;
  int64_t pair_blocks;  // blocks of the grid that have pairs
  int64_t pairs;
  int topk;
  const int32_t* slot_TK;
  device::ZeroRows to;
};

// A warp for each pair; the pairs of a token find its row in the cache. Lanes are those of
// lane_sum (base/math.h), and go over the row by kBatch octets whose loads wait together.
template <class T, bool kVector>
__global__ void __launch_bounds__(kRowThreads) scale_rows(const __grid_constant__ ScaleParams p) {
  constexpr int kBatch = 4;
  using Unit =
      std::conditional_t<kVector, uint4, std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>>;
  const int lane = threadIdx.x % 32;
  if (blockIdx.x >= p.pair_blocks) {
    const int64_t block = blockIdx.x - p.pair_blocks;
    return p.to.run<Unit>(block * kRowWarps + threadIdx.x / 32);
  }
  const int64_t pair = int64_t{blockIdx.x} * kRowWarps + threadIdx.x / 32;
  if (pair >= p.pairs) return;
  const int64_t slot = p.slot_TK[pair];
  if (slot < 0) return;
  const float w = *reinterpret_cast<const float*>(p.slot_w + slot * p.w_stride);
  const auto* g = reinterpret_cast<const T*>(p.g + pair / p.topk * p.g_stride);
  const auto* y = reinterpret_cast<const T*>(p.y + slot * p.y_stride);
  auto* to = reinterpret_cast<T*>(p.to.data + slot * p.to.stride);
  float sum = 0;
  for (int64_t first = lane * kOctet; first < p.n; first += kBatch * 32 * kOctet) {
    Octet<T> held_g[kBatch], held_y[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t c = first + i * 32 * kOctet;
      held_g[i] = load_octet<kVector>(g + c, p.n - c);
      if (p.y) held_y[i] = load_octet<kVector>(y + c, p.n - c);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t c = first + i * 32 * kOctet;
      float v[kOctet];
#pragma unroll
      for (int j = 0; j < kOctet; ++j) {
        v[j] = w * held_g[i][j];
        // What does not exist must not make a sum of -0 into +0.
        if (c + j < p.n) sum = __fmaf_rn(held_y[i][j], held_g[i][j], sum);
      }
      store_octet<kVector>(to + c, round_octet<T>(v), p.n - c);
    }
  }
  if (!p.y) return;
#pragma unroll
  for (int o = 16; o >= 1; o /= 2) sum += __shfl_down_sync(kWarp, sum, o);
  if (lane == 0) *reinterpret_cast<float*>(p.to.values + slot * p.to.value_stride) = sum;
}

template <class T>
void launch_scale(const ScaleParams& p, bool vectors, const Stream& stream) {
  const LaunchShape shape{p.pair_blocks + device::ZeroRows::blocks(p.to.capacity), kRowThreads};
  vectors ? launch("ep scale_rows", scale_rows<T, true>, shape, stream, p)
          : launch("ep scale_rows", scale_rows<T, false>, shape, stream, p);
}

}  // namespace

void scale_rows_cuda(const EpPlan& plan, const ScaleRowsArgs& a, const Stream& stream) {
  const Rows g(a.g_TD), y(a.y_CD), w(a.slot_w), gy(a.gy_CD), values(a.g_slot_w);
  ScaleParams p{.g = g[0],
                .y = y[0],
                .slot_w = w[0],
                .g_stride = g.stride(),
                .y_stride = y.stride(),
                .w_stride = w.stride(),
                .n = a.g_TD.size(1),
                .pair_blocks = blocks_for(plan.tokens * plan.topk, kRowWarps),
                .pairs = plan.tokens * plan.topk,
                .topk = plan.topk,
                .slot_TK = plan.slot_TK.data<int32_t>(),
                .to = zero_rows(plan, false)};
  p.to.data = gy[0];
  p.to.stride = gy.stride();
  p.to.bytes = byte_size(a.g_TD.dtype(), p.n);
  p.to.values = values[0];
  p.to.value_stride = values.stride();
  const bool vectors = octets_fit({&a.g_TD, &a.y_CD, &a.gy_CD});
  switch (a.g_TD.dtype()) {
    case DType::kBFloat16:
      return launch_scale<bf16>(p, vectors, stream);
    case DType::kFloat16:
      return launch_scale<fp16>(p, vectors, stream);
    default:
      return launch_scale<float>(p, vectors, stream);
  }
}

}  // namespace moiety::moe
