#include "moiety/base/launch.cuh"
#include "moiety/gemm/grouped_tensor.h"
#include "moiety/gemm/offsets_scan.h"

namespace moiety::gemm {
namespace {

constexpr int kWarp = 32;
constexpr unsigned kAll = ~0u;

// The sum of the lanes up to this one.
__device__ int64_t sum_of_lanes(int64_t v) {
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int64_t before = __shfl_up_sync(kAll, v, distance);
    if (static_cast<int>(threadIdx.x) >= distance) v = saturating_add(v, before);
  }
  return v;
}

// A lane's faults, the value of its first.
struct Faults {
  uint32_t bits = 0;
  int64_t value = 0;
  __device__ void add(uint32_t bit, int64_t what) {
    if (bits == 0) value = what;
    bits |= bit;
  }
};

// Records the fault of the lowest faulty group, as record_fault of row_groups.h does. The whole
// warp calls it.
__device__ void record(uint32_t* status, const Faults& mine, int64_t group) {
  const unsigned faulty = __ballot_sync(kAll, mine.bits != 0);
  if (!status || faulty == 0) return;
  const uint32_t bits = __reduce_or_sync(kAll, mine.bits);
  if (static_cast<int>(threadIdx.x) != __ffs(faulty) - 1) return;
  if (status[0] == 0) {
    status[1] = static_cast<uint32_t>(OperationId::kGroupedOffsets);
    status[2] = static_cast<uint32_t>(group);
    status[3] = static_cast<uint32_t>(mine.value);
  }
  status[0] |= bits;
}

// One warp, a group for each lane at a time.
__global__ void __launch_bounds__(kWarp) scan_counts(const __grid_constant__ OffsetsScan scan) {
  __shared__ int64_t total[kMaxOffsets];
  const int lane = threadIdx.x;
  if (lane < scan.size) {
    total[lane] = 0;
    if (scan.outputs[lane].leading_zero) scan.outputs[lane].out.put(0, 0);
  }
  int64_t used = 0;
  for (int64_t base = 0; base < scan.experts; base += kWarp) {
    const int64_t e = base + lane;
    int64_t n = e < scan.experts ? scan.count.get(e) : 0;
    // Whether a group fits is known when all before it are: one lane after the other.
    bool fits = true;
    for (int l = 0; l < kWarp; ++l) {
      const int64_t rows = __shfl_sync(kAll, n, l);
      const bool good = scan.fits(rows, used);
      if (good) used += rows;
      if (l == lane) fits = good;
    }
    Faults faults;
    if (!fits) {
      faults.add(kFaultGroup, n);
      n = 0;
    }
    for (int o = 0; o < scan.size; ++o) {
      const OffsetsScan::Output& output = scan.outputs[o];
      __syncwarp();
      const int64_t value = saturating_add(total[o], sum_of_lanes(output.size(n)));
      if (e < scan.experts && !output.put(e, value)) faults.add(kFaultSaturated, value);
      __syncwarp();
      if (lane == kWarp - 1) total[o] = value;
    }
    record(scan.status, faults, e);
    __syncwarp();
  }
}

}  // namespace

void grouped_offsets_cuda(const OffsetsScan& scan, const Stream& stream) {
  launch("grouped_offsets", scan_counts, {1, kWarp}, stream, scan);
}

}  // namespace moiety::gemm
