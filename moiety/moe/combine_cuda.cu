// Expert rows to tokens on a GPU: combine and dispatch_backward, and the scaled rows of
// combine_backward. A warp has a piece of one token's row; every lane has an octet of it, whose
// terms it adds in the order of the choices.
#include "moiety/base/launch.cuh"
#include "moiety/formats/octet.cuh"
#include "moiety/moe/exchange_cuda.h"
#include "moiety/moe/rows_device.cuh"

namespace moiety::moe {
namespace {

using device::kRowThreads;
using device::kRowWarps;
using device::kWarp;

struct Params {
  const std::byte *y, *slot_w, *addend, *side;  // null if absent
  std::byte *out, *side_out;
  int64_t y_stride, w_stride, addend_stride, side_stride, out_stride, side_out_stride;
  bool addend_fp32, out_fp32;
  bool round_terms;  // round the sum of the terms to T before the addend is added
  int64_t tokens, n;
  uint32_t pieces;  // pieces of a row
  int topk;
  const int32_t* slot_TK;
};

using SumKernel = void(Params);

// Loads the row of t, among rows of T or of float.
template <bool kVector, class T>
__device__ void load_row(const std::byte* row, bool fp32, int64_t c, int64_t n,
                         float (&v)[kOctet]) {
  const auto load = [&](auto element) {
    using E = decltype(element);
    const Octet<E> held = load_octet<kVector>(reinterpret_cast<const E*>(row) + c, n - c);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) v[i] = held[i];
  };
  fp32 ? load(float{}) : load(T{});
}

template <class T, bool kVector, bool kWeighted>
__global__ void __launch_bounds__(kRowThreads) sum_rows(const __grid_constant__ Params p) {
  constexpr int kBatch = 8;  // terms that wait for memory together
  const device::Piece piece(blockIdx.x, p.pieces);
  const int64_t t = piece.row;
  if (t >= p.tokens) return;
  const int lane = threadIdx.x % 32;
  const int64_t c = (int64_t{piece.piece} * 32 + lane) * kOctet;
  device::TokenSlots slots(p.slot_TK, t, p.topk);
  if (piece.piece == 0 && p.side_out && lane < p.topk) {
    const auto* from = reinterpret_cast<const uint32_t*>(p.side + slots.own() * p.side_stride);
    auto* to = reinterpret_cast<uint32_t*>(p.side_out + t * p.side_out_stride) + lane;
    *to = slots.own() < 0 ? 0 : *from;
  }
  float own_weight = 0;
  if (kWeighted && slots.own() >= 0) {
    own_weight = *reinterpret_cast<const float*>(p.slot_w + slots.own() * p.w_stride);
  }
  const int terms = slots.count();
  Octet<T> held[kBatch];
  float weight[kBatch], v[kOctet] = {};
  for (int done = 0; done < terms; done += kBatch) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (done + i >= terms) break;
      const int from = slots.next();
      if constexpr (kWeighted) weight[i] = __shfl_sync(kWarp, own_weight, from);
      const auto* row = reinterpret_cast<const T*>(p.y + slots.slot(from) * p.y_stride);
      held[i] = load_octet<kVector>(row + c, p.n - c);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (done + i >= terms) break;
#pragma unroll
      for (int j = 0; j < kOctet; ++j) {
        const float f = held[i][j];
        if (done + i == 0) {
          v[j] = kWeighted ? weight[i] * f : f;
        } else {
          v[j] = kWeighted ? __fmaf_rn(weight[i], f, v[j]) : v[j] + f;
        }
      }
    }
  }
  std::byte* const out = p.out + t * p.out_stride;
  const bool same_type = !p.out_fp32 || sizeof(T) == 4;
  if (!kWeighted && terms == 1 && !p.addend && same_type) {
    return store_octet_global<kVector>(reinterpret_cast<T*>(out) + c, held[0], p.n - c);
  }
  if (p.round_terms) {
    const Octet<T> rounded = round_octet<T>(v);
#pragma unroll
    for (int j = 0; j < kOctet; ++j) v[j] = rounded[j];
  }
  if (p.addend) {
    float more[kOctet];
    load_row<kVector, T>(p.addend + t * p.addend_stride, p.addend_fp32, c, p.n, more);
#pragma unroll
    for (int j = 0; j < kOctet; ++j) v[j] = terms == 0 ? more[j] : v[j] + more[j];
  }
  if (p.out_fp32) {
    store_octet_global<kVector>(reinterpret_cast<float*>(out) + c, round_octet<float>(v), p.n - c);
  } else {
    store_octet_global<kVector>(reinterpret_cast<T*>(out) + c, round_octet<T>(v), p.n - c);
  }
}

template <class T>
SumKernel* sum_kernel(bool vectors, bool weighted) {
  if (vectors) return weighted ? sum_rows<T, true, true> : sum_rows<T, true, false>;
  return weighted ? sum_rows<T, false, true> : sum_rows<T, false, false>;
}

SumKernel* sum_kernel(DType dtype, bool vectors, bool weighted) {
  return dtype == DType::kBFloat16  ? sum_kernel<bf16>(vectors, weighted)
         : dtype == DType::kFloat16 ? sum_kernel<fp16>(vectors, weighted)
                                    : sum_kernel<float>(vectors, weighted);
}

}  // namespace

void sum_rows_cuda(const EpPlan& plan, const SumArgs& a, const Stream& stream) {
  const Rows y(a.y_CD), slot_w(a.slot_w), addend(a.addend), side(a.side), out(a.out_TD),
      side_out(a.side_TK);
  const int64_t n = a.y_CD.size(1);
  const Params p{.y = y[0],
                 .slot_w = slot_w[0],
                 .addend = addend[0],
                 .side = side[0],
                 .out = out[0],
                 .side_out = side_out[0],
                 .y_stride = y.stride(),
                 .w_stride = slot_w.stride(),
                 .addend_stride = addend.stride(),
                 .side_stride = side.stride(),
                 .out_stride = out.stride(),
                 .side_out_stride = side_out.stride(),
                 .addend_fp32 = a.addend.dtype() == DType::kFloat32,
                 .out_fp32 = a.out_TD.dtype() == DType::kFloat32,
                 .round_terms = a.reduction == Reduction::kRank,
                 .tokens = plan.tokens,
                 .n = n,
                 .pieces = static_cast<uint32_t>(blocks_for(n, 32 * kOctet)),
                 .topk = plan.topk,
                 .slot_TK = plan.slot_TK.data<int32_t>()};
  const bool vectors = octets_fit({&a.y_CD, &a.addend, &a.out_TD});
  launch("ep sum_rows", sum_kernel(a.y_CD.dtype(), vectors, p.slot_w != nullptr),
         {blocks_for(p.tokens * p.pieces, kRowWarps), kRowThreads}, stream, p);
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

using ScaleKernel = void(ScaleParams);

// A warp has a pair; the other pairs of a token find its row in the cache. Lanes are those of
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
        // An element that does not exist must not turn a sum of -0 into +0.
        if (c + j < p.n) sum = __fmaf_rn(held_y[i][j], held_g[i][j], sum);
      }
      store_octet_global<kVector>(to + c, round_octet<T>(v), p.n - c);
    }
  }
  if (!p.y) return;
#pragma unroll
  for (int o = 16; o >= 1; o /= 2) sum += __shfl_down_sync(kWarp, sum, o);
  if (lane == 0) *reinterpret_cast<float*>(p.to.values + slot * p.to.value_stride) = sum;
}

ScaleKernel* scale_kernel(DType dtype, bool vectors) {
  switch (dtype) {
    case DType::kBFloat16:
      return vectors ? scale_rows<bf16, true> : scale_rows<bf16, false>;
    case DType::kFloat16:
      return vectors ? scale_rows<fp16, true> : scale_rows<fp16, false>;
    default:
      return vectors ? scale_rows<float, true> : scale_rows<float, false>;
  }
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
                .to = device::ZeroRows::of(plan, false)};
  p.to.data = gy[0];
  p.to.stride = gy.stride();
  p.to.bytes = byte_size(a.g_TD.dtype(), p.n);
  p.to.values = values[0];
  p.to.value_stride = values.stride();
  const bool vectors = octets_fit({&a.g_TD, &a.y_CD, &a.gy_CD});
  launch("ep scale_rows", scale_kernel(a.g_TD.dtype(), vectors),
         {p.pair_blocks + device::ZeroRows::blocks(p.to.capacity), kRowThreads}, stream, p);
}

}  // namespace moiety::moe
