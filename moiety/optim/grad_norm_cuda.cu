// Sums of squares on GPUs, in the order of grad_norm.h. A warp sums a block of 4096 elements: its
// thread j has lanes 4j ... 4j + 3 and those 128 further on, so that it loads four elements at a
// time. A product of two floats is exact in fp64, so an fma adds it as the contract says.
#include <vector>

#include "moiety/base/launch.cuh"
#include "moiety/formats/octet.cuh"
#include "moiety/optim/grad_norm_table.h"
#include "moiety/quant/device_table.h"

namespace moiety::optim::detail {
namespace {

constexpr int kThreads = 256, kWarp = 32, kQuad = 4, kHalves = 2;
constexpr unsigned kAllThreads = 0xFFFFFFFFu;
static_assert(kHalves * kWarp * kQuad == kNormLanes);

struct NormBlock {
  const void* grad;         // gradient of the segment
  int64_t at;               // first element of the block
  int32_t first_run, runs;  // the runs that touch the block
  bool narrow;
  bool aligned;  // quads lie at multiples of their size
};

// The elements of a run in a block, counted from the segment's first element.
struct Range {
  int64_t begin, end;
};

template <class G, bool kAligned>
__device__ void load_quad(const G* x, int64_t i, Range in, float (&v)[kQuad]) {
  if (kAligned && in.begin <= i && i + kQuad <= in.end) {
    if constexpr (sizeof(G) == 4) {
      const float4 q = *reinterpret_cast<const float4*>(x + i);
      v[0] = q.x, v[1] = q.y, v[2] = q.z, v[3] = q.w;
    } else {
      const uint2 q = *reinterpret_cast<const uint2*>(x + i);
      v[0] = low_bf16(q.x), v[1] = high_bf16(q.x);
      v[2] = low_bf16(q.y), v[3] = high_bf16(q.y);
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < kQuad; ++k) {
    v[k] = in.begin <= i + k && i + k < in.end ? float(x[i + k]) : 0.0f;
  }
}

// The lanes of a thread. Elements in no run add nothing to them.
struct Lanes {
  double sum[kHalves][kQuad] = {};
  int bad = 0;

  __device__ void add(int half, const float (&v)[kQuad]) {
#pragma unroll
    for (int k = 0; k < kQuad; ++k) {
      const double x = v[k];
      sum[half][k] = fma(x, x, sum[half][k]);
      bad += (__float_as_uint(v[k]) & 0x7F800000u) == 0x7F800000u;
    }
  }

  // The warp's lanes folded by halves.
  __device__ double fold() const {
    double lane[kQuad];
#pragma unroll
    for (int k = 0; k < kQuad; ++k) lane[k] = sum[0][k] + sum[1][k];
#pragma unroll
    for (int o = kWarp / 2; o >= 1; o /= 2) {
#pragma unroll
      for (int k = 0; k < kQuad; ++k) lane[k] += __shfl_down_sync(kAllThreads, lane[k], o);
    }
    return (lane[0] + lane[2]) + (lane[1] + lane[3]);
  }
};

template <class G, bool kAligned>
__device__ void add_range(const G* x, int64_t block, Range in, Lanes& lanes) {
  const int64_t last = (in.end - 1 - block) / kNormLanes;
  for (int64_t row = (in.begin - block) / kNormLanes; row <= last; ++row) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const int64_t i =
          block + row * kNormLanes + (h * kWarp + int64_t{threadIdx.x} % kWarp) * kQuad;
      float v[kQuad];
      load_quad<G, kAligned>(x, i, in, v);
      lanes.add(h, v);
    }
  }
}

// Adds a block that is whole and lies in one run.
template <class G>
__device__ void add_block(const G* x, Lanes& lanes) {
  constexpr int kRows = 4;  // rows at a time
  constexpr Range kWhole{0, kNormBlock};
  for (int64_t row = 0; row < kNormBlock / kNormLanes; row += kRows) {
    float v[kRows][kHalves][kQuad];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const int64_t i = (row + r) * kNormLanes + (h * kWarp + threadIdx.x % kWarp) * kQuad;
        load_quad<G, true>(x, i, kWhole, v[r][h]);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) lanes.add(h, v[r][h]);
    }
  }
}

// The sum over the runs of a class, or over all runs if `kind` is -1.
template <class G, bool kAligned>
__device__ double sum_runs(const NormBlock& b, const ElementRun* runs, int kind,
                           GradStatistics& out) {
  Lanes lanes;
  for (int r = 0; r < b.runs; ++r) {
    const ElementRun& run = runs[b.first_run + r];
    if (kind >= 0 && static_cast<int>(run.kind) != kind) continue;
    const int before = lanes.bad;
    add_range<G, kAligned>(static_cast<const G*>(b.grad), b.at,
                           {max(run.begin, b.at), min(run.end, b.at + kNormBlock)}, lanes);
    if (kind >= 0) continue;
    const int bad = __reduce_add_sync(kAllThreads, lanes.bad - before);
    if (bad > 0) out.add({.bad = bad, .bad_parameter = run.parameter});
  }
  return lanes.fold();
}

template <class G, bool kAligned>
__device__ GradStatistics sum_mixed_block(const NormBlock& b, const ElementRun* runs) {
  unsigned kinds = 0;
  for (int r = 0; r < b.runs; ++r) kinds |= 1u << static_cast<int>(runs[b.first_run + r].kind);
  GradStatistics out;
  const double all = sum_runs<G, kAligned>(b, runs, -1, out);
  out.sumsq = all;
  for (int c = 0; c < kParameterClasses; ++c) {
    if (kinds == 1u << c) out.class_sumsq[c] = all;
    if (kinds == 1u << c || !(kinds & 1u << c)) continue;
    out.class_sumsq[c] = sum_runs<G, kAligned>(b, runs, c, out);
  }
  return out;
}

template <class G>
__device__ GradStatistics sum_block(const NormBlock& b, const ElementRun* runs) {
  const ElementRun& run = runs[b.first_run];
  if (!b.aligned) return sum_mixed_block<G, false>(b, runs);
  if (b.runs != 1 || run.begin > b.at || run.end < b.at + kNormBlock) {
    return sum_mixed_block<G, true>(b, runs);
  }
  Lanes lanes;
  add_block(static_cast<const G*>(b.grad) + b.at, lanes);
  GradStatistics out;
  out.sumsq = lanes.fold();
  for (int c = 0; c < kParameterClasses; ++c) {
    if (static_cast<int>(run.kind) == c) out.class_sumsq[c] = out.sumsq;
  }
  out.bad = __reduce_add_sync(kAllThreads, lanes.bad);
  if (out.bad > 0) out.bad_parameter = run.parameter;
  return out;
}

// The blocks [first, end).
__global__ void __launch_bounds__(kThreads)
    sum_blocks(const NormBlock* __restrict__ blocks, const ElementRun* __restrict__ runs,
               int64_t first, int64_t end, GradStatistics* __restrict__ out) {
  const int64_t warp = first + (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp;
  if (warp >= end) return;
  const NormBlock b = blocks[warp];
  const GradStatistics sum = b.narrow ? sum_block<bf16>(b, runs) : sum_block<float>(b, runs);
  if (threadIdx.x % kWarp == 0) out[warp] = sum;
}

// The sum of sums [first, first + count), at most 4096, becomes sum `out`.
struct Fold {
  int64_t first, count, out;
};

// A block of threads does a fold; a thread is a lane.
__global__ void __launch_bounds__(kNormLanes)
    fold_sums(const Fold* __restrict__ folds, GradStatistics* sums) {
  __shared__ GradStatistics lanes[kNormLanes];
  const Fold fold = folds[blockIdx.x];
  const int64_t lane = threadIdx.x;
  cudaGridDependencySynchronize();
  GradStatistics mine;
  for (int64_t i = lane; i < fold.count; i += kNormLanes) mine.add(sums[fold.first + i]);
  lanes[lane] = mine;
  for (int64_t o = kNormLanes / 2; o >= 1; o /= 2) {
    __syncthreads();
    if (lane < o) lanes[lane].add(lanes[lane + o]);
  }
  if (lane == 0) sums[fold.out] = lanes[0];
}

// One thread adds the segments' sums, which are at the places `where`; the others fetch them.
__global__ void __launch_bounds__(kNormLanes)
    add_segments(const int64_t* __restrict__ where, int64_t segments, const GradStatistics* sums,
                 GradStatistics* out) {
  __shared__ GradStatistics fetched[kNormLanes];
  cudaGridDependencySynchronize();
  GradStatistics all;
  for (int64_t at = 0; at < segments; at += kNormLanes) {
    const int64_t n = min(kNormLanes, segments - at);
    if (threadIdx.x < n) fetched[threadIdx.x] = sums[where[at + threadIdx.x]];
    __syncthreads();
    for (int64_t s = 0; s < n && threadIdx.x == 0; ++s) all.add(fetched[s]);
    __syncthreads();
  }
  if (threadIdx.x == 0) *out = all;
}

void append_blocks(const GradSegment& s, int64_t first_run, std::vector<NormBlock>& blocks) {
  const bool narrow = s.grad.dtype() == DType::kBFloat16;
  const auto address = reinterpret_cast<uintptr_t>(s.grad.raw());
  const auto& runs = s.runs;
  size_t first = 0;
  for (int64_t at = 0; at < s.grad.numel(); at += kNormBlock) {
    while (first < runs.size() && runs[first].end <= at) ++first;
    size_t last = first;
    while (last < runs.size() && runs[last].begin < at + kNormBlock) ++last;
    blocks.push_back({.grad = s.grad.raw(),
                      .at = at,
                      .first_run = static_cast<int32_t>(first_run + first),
                      .runs = static_cast<int32_t>(last - first),
                      .narrow = narrow,
                      .aligned = address % byte_size(s.grad.dtype(), kQuad) == 0});
  }
}

// Groups the sums of the segments that have several; the results come after the `sums` that there
// are.
std::vector<Fold> next_level(std::vector<Fold>& open, int64_t& sums) {
  std::vector<Fold> level;
  for (Fold& segment : open) {
    if (segment.count == 1) continue;
    const Fold before = segment;
    segment = {sums, 0, 0};
    for (int64_t at = 0; at < before.count; at += kNormBlock) {
      level.push_back({before.first + at, std::min(kNormBlock, before.count - at), sums++});
      ++segment.count;
    }
  }
  return level;
}

}  // namespace

struct GradDeviceTable {
  struct Level {
    Buffer folds;
    int64_t count;
  };
  Buffer runs, blocks, where, sums;
  std::vector<int64_t> first_block;  // of each segment, and behind the last one
  int64_t segment_count = 0;         // that have elements
  std::vector<Level> levels;
};

std::shared_ptr<const GradDeviceTable> make_device_table(std::span<const GradSegment> segments,
                                                         Device device) {
  const auto table = std::make_shared<GradDeviceTable>();
  std::vector<ElementRun> runs;
  std::vector<NormBlock> blocks;
  std::vector<Fold> open;  // the sums of each segment that are still to be folded
  for (const GradSegment& s : segments) {
    const auto first = static_cast<int64_t>(blocks.size());
    table->first_block.push_back(first);
    append_blocks(s, static_cast<int64_t>(runs.size()), blocks);
    runs.insert(runs.end(), s.runs.begin(), s.runs.end());
    const auto count = static_cast<int64_t>(blocks.size()) - first;
    if (count > 0) open.push_back({first, count, 0});
  }
  int64_t sums = static_cast<int64_t>(blocks.size());
  table->first_block.push_back(sums);
  const Stream stream = Stream::on(device);
  for (;;) {
    const std::vector<Fold> level = next_level(open, sums);
    if (level.empty()) break;
    table->levels.push_back(
        {quant::upload(level, "folds of the norm", stream), static_cast<int64_t>(level.size())});
  }
  std::vector<int64_t> where;
  for (const Fold& f : open) where.push_back(f.first);
  table->segment_count = static_cast<int64_t>(where.size());
  table->runs = quant::upload(runs, "runs of the norm", stream);
  table->blocks = quant::upload(blocks, "blocks of the norm", stream);
  table->where = quant::upload(where, "segments of the norm", stream);
  table->sums = Buffer(sums * int64_t{sizeof(GradStatistics)}, device, "sums of the norm");
  stream.synchronize();
  return table;
}

void begin_grad_statistics_cuda(const GradDeviceTable& table, size_t first, size_t end,
                                const Stream& stream) {
  const int64_t begin = table.first_block[first], blocks = table.first_block[end] - begin;
  launch("grad_statistics", sum_blocks, {blocks_for(blocks, kThreads / kWarp), kThreads}, stream,
         reinterpret_cast<const NormBlock*>(table.blocks.data()),
         reinterpret_cast<const ElementRun*>(table.runs.data()), begin, begin + blocks,
         reinterpret_cast<GradStatistics*>(table.sums.data()));
}

void end_grad_statistics_cuda(const GradDeviceTable& table, TensorView out, const Stream& stream) {
  auto* sums = reinterpret_cast<GradStatistics*>(table.sums.data());
  for (const GradDeviceTable::Level& level : table.levels) {
    launch("grad_statistics: fold", fold_sums,
           {.blocks = level.count, .threads = kNormLanes, .early = true}, stream,
           reinterpret_cast<const Fold*>(level.folds.data()), sums);
  }
  launch("grad_statistics: add", add_segments, {.blocks = 1, .threads = kNormLanes, .early = true},
         stream, reinterpret_cast<const int64_t*>(table.where.data()), table.segment_count, sums,
         static_cast<GradStatistics*>(out.raw()));
}

}  // namespace moiety::optim::detail
