#include <algorithm>

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

// One warp, a group for each lane at a time. Returns the number of rows of all groups.
__device__ int64_t scan_counts(const OffsetsScan& scan) {
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
  return used;
}

// The same number alone.
__device__ int64_t rows_of_groups(const OffsetsScan& scan) {
  const int lane = threadIdx.x;
  int64_t sum = 0;
  bool good = true;
  for (int64_t e = lane; e < scan.experts; e += kWarp) {
    const int64_t n = scan.count.get(e);
    good = good && n >= 0;
    sum = saturating_add(sum, good ? n : 0);
  }
  sum = __shfl_sync(kAll, sum_of_lanes(sum), kWarp - 1);
  if (__all_sync(kAll, good) && sum <= scan.capacity) return sum;
  int64_t used = 0;  // one group after the other
  for (int64_t e = 0; e < scan.experts; ++e) {
    const int64_t n = scan.count.get(e);
    if (scan.fits(n, used)) used += n;
  }
  return used;
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

__device__ void zero(const Zeroed& zeroed, int64_t row, int lane) {
  for (int i = 0; i < zeroed.size; ++i) {
    const Zeroed::Buffer& b = zeroed.buffers[i];
    char* to = b.rows + row * b.stride;
    b.wide ? zero_row<uint4>(to, b.bytes, lane) : zero_row<char>(to, b.bytes, lane);
  }
}

// The first block writes the offsets; each zeroes, of the rows that are its own, those past the last
// group, a warp a row.
__global__ void __launch_bounds__(kZeroThreads)
    scan_and_zero(const __grid_constant__ OffsetsScan scan, const __grid_constant__ Zeroed zeroed) {
  __shared__ int64_t live;
  if (threadIdx.x < kWarp) {
    const int64_t rows = blockIdx.x == 0 ? scan_counts(scan) : rows_of_groups(scan);
    if (threadIdx.x == 0) live = rows;
  }
  if (zeroed.size == 0) return;
  __syncthreads();
  const int64_t first = int64_t{blockIdx.x} * kZeroThreads;
  const int64_t end = min(first + kZeroThreads, scan.capacity);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  for (int64_t r = max(first, live) + warp; r < end; r += kZeroThreads / kWarp) {
    zero(zeroed, r, lane);
  }
}

// Warps look at 32 rows at a time, a lane each, and zero those that are dead together.
__global__ void __launch_bounds__(kZeroThreads)
    zero_rows(LiveRows groups, const __grid_constant__ Zeroed zeroed) {
  const int lane = threadIdx.x % 32;
  const int64_t first = (int64_t{blockIdx.x} * kZeroThreads + threadIdx.x) / 32 * 32;
  const bool exists = first + lane < groups.capacity;
  uint32_t dead = __ballot_sync(~0u, exists && !groups.live(first + lane));
  for (; dead != 0; dead &= dead - 1) zero(zeroed, first + __ffs(dead) - 1, lane);
}

Zeroed zeroed_of(std::span<const TensorView> buffers) {
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
  return zeroed;
}

}  // namespace

void grouped_offsets_cuda(const OffsetsScan& scan, std::span<const TensorView> zeroed,
                          const Stream& stream) {
  const Zeroed buffers = zeroed_of(zeroed);
  const int64_t blocks = buffers.size == 0 ? 1 : blocks_for(scan.capacity, kZeroThreads);
  launch("grouped_offsets", scan_and_zero,
         {std::max<int64_t>(blocks, 1), buffers.size == 0 ? kWarp : kZeroThreads}, stream, scan,
         buffers);
}

void zero_dead_rows_cuda(const Groups& groups, const TensorView& rows, const Stream& stream) {
  const Zeroed buffers = zeroed_of({&rows, 1});
  launch("zero_dead_rows", zero_rows,
         {buffers.size == 0 ? 0 : blocks_for(groups.capacity, kZeroThreads), kZeroThreads}, stream,
         LiveRows(groups), buffers);
}

}  // namespace moiety::gemm
