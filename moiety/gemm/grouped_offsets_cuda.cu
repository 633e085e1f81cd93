#include "moiety/base/launch.cuh"
#include "moiety/gemm/grouped_tensor.h"
#include "moiety/gemm/offsets_scan.h"
#include "moiety/quant/quantize_group.h"

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

// Rows of groups, as row_groups.h has them.
struct LiveRows {
  const int64_t* begin;
  const int64_t* count;
  int64_t groups, capacity;

  explicit LiveRows(const quant::RowGroups& g)
      : begin(g.begin_E1.data<int64_t>()),
        count(g.count_E.defined() ? g.count_E.data<int64_t>() : nullptr),
        groups(g.experts),
        capacity(g.capacity) {}
  // Whether row r belongs to a group: to the last one that begins at it or before.
  __device__ bool live(int64_t r) const {
    int64_t low = 0,
            high = groups;  // groups from `high` on begin behind r, those before `low` do not
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (begin[middle] <= r) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    if (low == 0) return false;
    const int64_t e = low - 1;  // a faulty group is empty
    const quant::Claim c =
        quant::claim(begin[e], begin[e + 1], count ? count + e : nullptr, capacity);
    return c.valid && r >= c.begin && r < c.begin + c.rows;
  }
};

constexpr int kZeroThreads = 256;

// Buffers whose dead rows become zero.
struct Zeroed {
  struct Buffer {
    char* rows;
    int64_t stride, bytes;  // from one row to the next, and of a row
    bool wide;              // 16 bytes at a time
  };
  Buffer buffers[kMaxZeroed];
  int size = 0;
};

template <class Unit>
__device__ void zero_row(char* row, int64_t bytes, int lane) {
  auto* out = reinterpret_cast<Unit*>(row);
  for (int64_t i = lane; i < bytes / int64_t{sizeof(Unit)}; i += 32) out[i] = Unit{};
}

// Warps look at 32 rows at a time, a lane each, and zero those that are dead together.
__global__ void __launch_bounds__(kZeroThreads)
    zero_rows(LiveRows groups, const __grid_constant__ Zeroed zeroed) {
  const int lane = threadIdx.x % 32;
  const int64_t first = (int64_t{blockIdx.x} * kZeroThreads + threadIdx.x) / 32 * 32;
  const bool exists = first + lane < groups.capacity;
  uint32_t dead = __ballot_sync(~0u, exists && !groups.live(first + lane));
  for (; dead != 0; dead &= dead - 1) {
    const int64_t r = first + __ffs(dead) - 1;
    for (int i = 0; i < zeroed.size; ++i) {
      const Zeroed::Buffer& b = zeroed.buffers[i];
      char* row = b.rows + r * b.stride;
      b.wide ? zero_row<uint4>(row, b.bytes, lane) : zero_row<char>(row, b.bytes, lane);
    }
  }
}

}  // namespace

void grouped_offsets_cuda(const OffsetsScan& scan, const Stream& stream) {
  launch("grouped_offsets", scan_counts, {1, kWarp}, stream, scan);
}

void zero_dead_rows_cuda(const Groups& groups, std::span<const TensorView> buffers,
                         const Stream& stream) {
  Zeroed zeroed{};
  for (const TensorView& rows : buffers) {
    const int64_t bytes = byte_size(rows.dtype(), rows.dims() == 1 ? 1 : rows.size(1));
    const int64_t stride = byte_size(rows.dtype(), rows.stride(0));
    const bool wide =
        (reinterpret_cast<uintptr_t>(rows.raw()) | uintptr_t(bytes | stride)) % 16 == 0;
    if (bytes > 0) {
      zeroed.buffers[zeroed.size++] = {static_cast<char*>(rows.raw()), stride, bytes, wide};
    }
  }
  launch("zero_dead_rows", zero_rows,
         {zeroed.size == 0 ? 0 : blocks_for(groups.capacity, kZeroThreads), kZeroThreads}, stream,
         LiveRows(groups), zeroed);
}

}  // namespace moiety::gemm
