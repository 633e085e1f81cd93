// The host side of quantization on GPUs: the choice of kernels and the source that they run over.
#include <algorithm>
#include <bit>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "moiety/quant/device_table.h"
#include "moiety/quant/quantize/quantize_cuda.h"
#include "moiety/quant/quantize/quantize_launch.cuh"

namespace moiety::quant {
namespace {

using device::CastKind;
using device::kTile;
using device::Source;
using device::Tiling;

// A launch has at most this many blocks, which walk over more tiles.
constexpr int64_t kMostBlocks = std::numeric_limits<int32_t>::max();

// Clears the slots that maxima are added to; for groups those of group e.
__device__ void clear_amax(const QuantizeJob& job, bool measure, int64_t e) {
  if (job.spec.row_scaled || !(measure || job.delayed_scale)) return;
  for (int i = 0; i < 2; ++i) {
    if ((i == 0 ? job.want_row : job.want_col) && job.amax[i]) job.amax[i][e] = 0;
  }
}

// The device's version of record_fault (row_groups.h), for one thread.
__device__ void record_device_fault(uint32_t* status, int64_t group, int64_t value) {
  if (status[0] == 0) {
    status[1] = static_cast<uint32_t>(OperationId::kQuantizeGrouped);
    status[2] = static_cast<uint32_t>(group);
    status[3] = static_cast<uint32_t>(value);
  }
  status[0] |= kFaultGroup;
}

// Records the faults of groups: impossible claims first, then groups that overlap. A whole warp
// calls it.
__device__ void record_device_faults(const Source& source) {
  for (const bool overlaps : {false, true}) {
    device::walk_groups(
        source, [](int64_t, int64_t, int64_t, int64_t) {},
        [&](int64_t e, int64_t rows, bool late) {
          if (late == overlaps) record_device_fault(source.status, e, rows);
        });
  }
}

// Begins jobs: one thread per job, or one block for all groups.
__global__ void __launch_bounds__(device::kThreads)
    begin_jobs(const __grid_constant__ Source source, bool measure) {
  cudaTriggerProgrammaticLaunchCompletion();
  const bool clear = !(source.skip && *source.skip != 0);
  const int64_t i = int64_t{blockIdx.x} * device::kThreads + threadIdx.x;
  if (source.kind == Source::Kind::kSingle) {
    if (clear && i == 0) clear_amax(source.job, measure, 0);
  } else if (source.kind == Source::Kind::kMany) {
    if (clear && i < source.count) clear_amax(source.jobs[i], measure, 0);
  } else {
    bool fault = false;
    for (int64_t e = i; e < source.experts; e += device::kThreads) {
      if (clear) clear_amax(source.job, measure, e);
      fault = fault || !device::claim_of(source, e).valid;
    }
    // Claims that are all valid do not overlap either.
    if (__syncthreads_or(fault) && source.status && i < 32) record_device_faults(source);
  }
}

Tiling tiling_of(const CastKind& kind) {
  // A tile has whole rows, however many columns they have.
  if (kind.row_scaled) return {device::kScaledRows, std::numeric_limits<int64_t>::max() / 2};
  return {};
}

Source single(const QuantizeJob& job) {
  Source s;
  s.tiling = tiling_of(device::kind_of(job));
  s.skip = job.skip;
  s.job = job;
  s.tiles = device::tiles_of(job.padded_rows, job.cols, s.tiling).count();
  return s;
}

Source grouped(const QuantizeJob& whole, const RowGroups& groups) {
  Source s = single(whole);
  s.kind = Source::Kind::kGroups;
  const auto pointer = [](const TensorView& view, auto* type) {
    return static_cast<decltype(type)>(view.raw());
  };
  s.count_E = pointer(groups.count_E, (const int64_t*)nullptr);
  s.begin_E1 = pointer(groups.begin_E1, (const int64_t*)nullptr);
  s.status = pointer(groups.status, (uint32_t*)nullptr);
  s.experts = groups.experts;
  s.capacity = groups.capacity;
  const int64_t columns = device::tiles_of(1, whole.cols, s.tiling).cols;
  s.tiles = (whole.rows / s.tiling.rows + groups.experts) * columns;
  return s;
}

void begin(const Source& source, bool measure, const Stream& stream) {
  const int64_t blocks =
      source.kind == Source::Kind::kMany ? blocks_for(source.count, device::kThreads) : int64_t{1};
  launch("quantize", begin_jobs, {blocks, device::kThreads}, stream, source, measure);
}

void measure(const CastKind& kind, const Source& source, bool col, int64_t blocks,
             const Stream& stream) {
  if (kind.row_scaled) return device::launch_scaled_rows(kind, source, false, blocks, stream);
  device::launch_measure(kind, col && kind.rotated, source, blocks, stream);
}

void cast(const CastKind& kind, const Source& source, int64_t blocks, const Stream& stream) {
  if (kind.row_scaled) {
    device::launch_scaled_rows(kind, source, true, blocks, stream);
  } else if (is_fp4(kind.format)) {
    device::launch_nvfp4(kind, source, blocks, stream);
  } else if (is_mxfp8(kind.format)) {
    device::launch_mxfp8(kind, source, blocks, stream);
  } else {
    device::launch_fp8(kind, source, blocks, stream);
  }
}

// `like` stands for all jobs of the source, which are alike in the properties that matter here.
void run(Source source, const QuantizeJob& like, bool only_measure, const Stream& stream) {
  const CastKind kind = device::kind_of(like);
  const bool measures = only_measure || (like.measures_first() && !kind.row_scaled);
  const bool single = source.kind == Source::Kind::kSingle,
             groups = source.kind == Source::Kind::kGroups;
  // A block takes several tiles where each costs a search, or one more word to the same address.
  const auto most = static_cast<uint64_t>(std::clamp<int64_t>(source.tiles / 2048, 1, 8));
  const auto several = static_cast<int64_t>(std::bit_floor(most));
  source.run = single ? 1 : several;
  const auto blocks = [&](int64_t tiles) {
    return std::min(blocks_for(source.tiles, tiles), kMostBlocks);
  };
  if (measures || like.delayed_scale || groups) {
    begin(source, measures, stream);
    source.early = true;
  }
  if (measures) {
    measure(kind, source, like.want_col, blocks(several), stream);
    source.early = true;
  }
  if (!only_measure) cast(kind, source, blocks(source.run), stream);
}

}  // namespace

void measure_cuda(const QuantizeJob& job, const Stream& stream) {
  run(single(job), job, true, stream);
}

void quantize_cuda(const QuantizeJob& job, const Stream& stream) {
  run(single(job), job, false, stream);
}

void measure_groups_cuda(const QuantizeJob& whole, const RowGroups& groups, const Stream& stream) {
  run(grouped(whole, groups), whole, true, stream);
}

void quantize_groups_cuda(const QuantizeJob& whole, const RowGroups& groups, const Stream& stream) {
  run(grouped(whole, groups), whole, false, stream);
}

// Jobs that the same kernels serve, in one launch per pass.
struct QuantizeTable::Device {
  struct Batch {
    QuantizeJob like;
    Buffer jobs, first_tile;
    Source source;
  };
  std::vector<Batch> batches;
};

namespace {

bool alike(const QuantizeJob& a, const QuantizeJob& b) {
  const auto traits = [](const QuantizeJob& j) {
    return std::tuple(j.measures_first(), j.delayed_scale != nullptr, j.want_row, j.want_col);
  };
  return device::kind_of(a) == device::kind_of(b) && traits(a) == traits(b);
}

QuantizeTable::Device::Batch make_batch(const std::vector<QuantizeJob>& jobs,
                                        const Stream& stream) {
  QuantizeTable::Device::Batch batch;
  batch.like = jobs.front();
  Source& s = batch.source;
  s.kind = Source::Kind::kMany;
  s.tiling = tiling_of(device::kind_of(batch.like));
  s.skip = batch.like.skip;
  std::vector<int64_t> first_tile;
  for (const QuantizeJob& job : jobs) {
    first_tile.push_back(s.tiles);
    s.tiles += device::tiles_of(job.padded_rows, job.cols, s.tiling).count();
  }
  first_tile.push_back(s.tiles);
  s.count = static_cast<int64_t>(jobs.size());
  batch.jobs = upload(jobs, "table of tensors to be quantized", stream);
  batch.first_tile = upload(first_tile, "table of tensors to be quantized", stream);
  s.jobs = reinterpret_cast<const QuantizeJob*>(batch.jobs.data());
  s.first_tile = reinterpret_cast<const int64_t*>(batch.first_tile.data());
  return batch;
}

}  // namespace

std::shared_ptr<const QuantizeTable::Device> make_device_table(std::span<const QuantizeJob> jobs,
                                                               moiety::Device device) {
  std::vector<std::vector<QuantizeJob>> groups;
  for (const QuantizeJob& job : jobs) {
    const auto group = std::find_if(groups.begin(), groups.end(),
                                    [&](const auto& g) { return alike(g.front(), job); });
    if (group == groups.end()) {
      groups.push_back({job});
    } else {
      group->push_back(job);
    }
  }
  const Stream stream = Stream::on(device);
  auto table = std::make_shared<QuantizeTable::Device>();
  for (const auto& group : groups) table->batches.push_back(make_batch(group, stream));
  stream.synchronize();
  return table;
}

void quantize_many_cuda(const QuantizeTable::Device& table, const Stream& stream) {
  for (const auto& batch : table.batches) run(batch.source, batch.like, false, stream);
}

}  // namespace moiety::quant
