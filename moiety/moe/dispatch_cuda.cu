// Rows to experts on a GPU: dispatch and, where it only copies, combine_backward. A warp has a
// piece of one token's row, which it reads once and writes to every slot of the token; warps behind
// those zero the rows that no token has.
#include <array>
#include <type_traits>

#include "moiety/base/copy.h"
#include "moiety/base/kernel_list.cuh"
#include "moiety/moe/copy_kernel.h"
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

// The rows of one part, all but what a kernel decides.
CopyParams part_of(const EpPlan& plan, const Rows& from, const Rows& to, int64_t bytes, bool tail) {
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
  return p;
}

// The launch for a part, and the numbers of it that depend on the kernel.
KernelStart<CopyParams> start_copy(CopyParams& p) {
  const CopyKernel chosen =
      choose_copy({p.from, p.to.data}, {p.from_stride, p.to.stride, p.to.bytes});
  return start_of<kCopyKernels>(chosen, [&]<CopyKernel k>() -> KernelStart<CopyParams> {
    using Small = std::conditional_t<k.unit == 2, uint16_t, uint8_t>;
    using Unit =
        std::conditional_t<k.unit == 16, uint4, std::conditional_t<k.unit == 4, uint32_t, Small>>;
    p.pieces = static_cast<uint32_t>(blocks_for(p.to.bytes / k.unit, 32 * kUnits<Unit>));
    p.token_blocks = blocks_for(p.tokens * p.pieces, kRowWarps);
    return {copy_part<Unit>,
            {p.token_blocks + device::ZeroRows::blocks(p.to.capacity), kRowThreads}};
  });
}

// The rows of experts whose amax is wanted; a warp has a slot.
struct AmaxParams {
  const std::byte* rows;
  int64_t stride, model, capacity;
  const int32_t *slot_row, *source;  // source: the place of each slot's row, or null
  const int64_t* offset;
  int64_t experts;
  uint32_t* amax;
};

__device__ uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7FFFFFFF; }
__device__ uint32_t magnitude_bits(uint16_t bf16_bits) { return (bf16_bits & 0x7FFFu) << 16; }

// The largest bits are those of the largest magnitude, whoever comes first.
template <class T>
__global__ void __launch_bounds__(kRowThreads) find_amax(const __grid_constant__ AmaxParams p) {
  const int lane = threadIdx.x % 32;
  const int64_t slot = int64_t{blockIdx.x} * kRowWarps + threadIdx.x / 32;
  if (slot >= p.capacity || slot >= p.offset[p.experts] || p.slot_row[slot] < 0) return;
  const int64_t place = p.source ? p.source[slot] : slot;
  const auto* row = reinterpret_cast<const T*>(p.rows + place * p.stride);
  uint32_t most = 0;
#pragma unroll 8
  for (int64_t i = lane; i < p.model; i += 32) most = max(most, magnitude_bits(row[i]));
  most = __reduce_max_sync(0xFFFFFFFF, most);
  if (lane > 0) return;
  int64_t expert = 0;  // the last one that begins at or before the slot
  for (int64_t end = p.experts; expert + 1 < end;) {
    const int64_t middle = (expert + end) / 2;
    (p.offset[middle] <= slot ? expert : end) = middle;
  }
  atomicMax(p.amax + expert, most);
}

}  // namespace

void find_amax_cuda(const EpPlan& plan, const DispatchRows& d, const Stream& stream) {
  fill_bytes(d.sink.amax, 0, stream);
  const AmaxParams p{.rows = d.rows.data[0],
                     .stride = d.rows.data.stride(),
                     .model = d.x.model,
                     .capacity = plan.capacity,
                     .slot_row = plan.slot_row.data<int32_t>(),
                     .source = d.rows.source,
                     .offset = plan.offset.data<int64_t>(),
                     .experts = plan.rows_real.size(0),
                     .amax = static_cast<uint32_t*>(d.sink.amax.raw())};
  if (p.capacity == 0 || p.experts == 0) return;
  const LaunchShape shape{blocks_for(p.capacity, kRowWarps), kRowThreads};
  if (d.x.format == PayloadFormat::kBF16) {
    launch("ep amax", find_amax<uint16_t>, shape, stream, p);
  } else {
    launch("ep amax", find_amax<float>, shape, stream, p);
  }
}

void copy_rows_cuda(const EpPlan& plan, const SourceRows& x, const TensorView& w_TK,
                    const ExpertRows& rows, bool tail, const Stream& stream) {
  std::array parts = {
      part_of(plan, x.data, rows.data, x.parts.data, tail),
      part_of(plan, x.scales, rows.scales.compact(), x.parts.scales, tail),
      part_of(plan, x.row_scale, rows.row_scale, x.parts.row_scale, tail),
  };
  if (rows.has_values) {
    const Rows w(w_TK);
    parts[0].weights = w[0];
    parts[0].weight_stride = w.stride();
    parts[0].to.values = rows.values[0];
    parts[0].to.value_stride = rows.values.stride();
  }
  for (CopyParams& p : parts) {
    if (p.to.bytes == 0) continue;
    const auto start = start_copy(p);
    launch("ep copy_rows", start.kernel, start.shape, stream, p);
  }
}

}  // namespace moiety::moe
