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

}  // namespace

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
