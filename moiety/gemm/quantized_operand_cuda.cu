#include "moiety/base/launch.cuh"
#include "moiety/gemm/quantized_operand_cuda.h"
#include "moiety/quant/quantize_group.h"

namespace moiety::gemm {
namespace {

constexpr int kWarp = 32;

struct Params {
  const int64_t *begin, *count;  // count is null if groups are tight
  int64_t *out_begin, *out_count;
  int64_t experts, capacity, tail;
};

// One warp; a lane takes one group at a time.
__global__ void __launch_bounds__(kWarp) pad_groups(Params p) {
  const int lane = threadIdx.x;
  int64_t first = 0;
  for (int64_t base = 0; base < p.experts; base += kWarp) {
    const int64_t e = base + lane;
    int64_t rows = 0;
    if (e < p.experts) {
      const quant::Claim c =
          quant::claim(p.begin[e], p.begin[e + 1], p.count ? p.count + e : nullptr, p.capacity);
      rows = c.valid ? c.rows : 0;
    }
    const int64_t padded = quant::padded_group_rows(rows);
    int64_t end = padded;
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int64_t before = __shfl_up_sync(~0u, end, distance);
      if (lane >= distance) end += before;
    }
    if (e < p.experts) {
      p.out_begin[e] = first + end - padded;
      p.out_count[e] = (rows + p.tail - 1) / p.tail * p.tail;
    }
    first += __shfl_sync(~0u, end, kWarp - 1);
  }
  if (lane == 0) p.out_begin[p.experts] = first;
}

constexpr int kGatherThreads = 256, kGatherRows = kGatherThreads / kWarp;

struct Gather {
  const std::byte* from;
  std::byte* to;
  const int32_t* source;
  int64_t stride, bytes, rows, sources;
};

// A warp has a row, which is whole Units at multiples of their size.
template <class Unit>
__global__ void __launch_bounds__(kGatherThreads) gather(const __grid_constant__ Gather p) {
  const int64_t r = int64_t{blockIdx.x} * kGatherRows + threadIdx.x / kWarp;
  if (r >= p.rows) return;
  const int64_t source = p.source[r], units = p.bytes / int64_t{sizeof(Unit)};
  const bool exists = source >= 0 && source < p.sources;
  const auto* from = reinterpret_cast<const Unit*>(p.from + (exists ? source : 0) * p.stride);
  auto* to = reinterpret_cast<Unit*>(p.to + r * p.bytes);
#pragma unroll 4
  for (int64_t i = threadIdx.x % kWarp; i < units; i += kWarp) to[i] = exists ? from[i] : Unit{};
}

}  // namespace

void gather_rows_cuda(const GroupedTensor& x, const TensorView& out, const Stream& stream) {
  const Gather p{static_cast<const std::byte*>(x.data.raw()),
                 static_cast<std::byte*>(out.raw()),
                 x.source_R.data<int32_t>(),
                 byte_size(out.dtype(), x.data.stride(0)),
                 byte_size(out.dtype(), out.size(1)),
                 out.size(0),
                 x.data.size(0)};
  const auto places = reinterpret_cast<uintptr_t>(p.from) | reinterpret_cast<uintptr_t>(p.to) |
                      static_cast<uintptr_t>(p.stride | p.bytes);
  const auto kernel = places % 16 == 0  ? gather<uint4>
                      : places % 4 == 0 ? gather<uint32_t>
                                        : gather<uint16_t>;
  launch("gather rows", kernel, {blocks_for(p.rows, kGatherRows), kGatherThreads}, stream, p);
}

void operand_groups_cuda(const Groups& groups, int64_t tail, const Groups& out,
                         const Stream& stream) {
  const Params p{groups.begin_E1.data<int64_t>(),
                 groups.count_E.defined() ? groups.count_E.data<int64_t>() : nullptr,
                 out.begin_E1.data<int64_t>(),
                 out.count_E.data<int64_t>(),
                 groups.experts,
                 groups.capacity,
                 tail};
  launch("pad groups", pad_groups, {1, kWarp}, stream, p);
}

}  // namespace moiety::gemm
