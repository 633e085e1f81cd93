// The host side of quantization on GPUs: the choice of kernels and the source that they run over.
#include <algorithm>
#include <bit>
#include <limits>
#include <span>
#include <vector>

#include "moiety/quant/device_table.h"
#include "moiety/quant/quantize/quantize_cuda.h"
#include "moiety/quant/quantize/quantize_launch.cuh"

namespace moiety::quant {
namespace {

using device::Launches;
using device::QuantizeLaunch;
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
    begin_jobs(const __grid_constant__ Source source) {
  cudaTriggerProgrammaticLaunchCompletion();
  const bool measure = source.measures;
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

Tiling tiling_of(bool row_scaled) {
  // A tile has whole rows, however many columns they have.
  if (row_scaled) return {device::kScaledRows, std::numeric_limits<int64_t>::max() / 2};
  return {};
}

Source single(const QuantizeJob& job) {
  Source s;
  s.tiling = tiling_of(job.spec.row_scaled);
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

const QuantizeLaunch& launch_of(QuantizePass pass, const QuantizeTraits& traits) {
  const QuantizeKernel chosen = choose_kernel(pass, traits);
  for (const auto& table : {device::fp8_launches(), device::mxfp8_launches(),
                            device::nvfp4_launches(), device::requantize_launches()}) {
    for (const QuantizeLaunch& row : table) {
      if (row.is == chosen) return row;
    }
  }
  fail(ErrorKind::kUnsupported, "quantize: {} has a kernel in no table", name(chosen.format));
}

// A block takes several tiles where each costs a search, or one more word to the same address.
int64_t tiles_a_block(const Source& source) {
  const auto most = static_cast<uint64_t>(std::clamp<int64_t>(source.tiles / 2048, 1, 8));
  return static_cast<int64_t>(std::bit_floor(most));
}

// `traits`: those of all jobs of the source. The last pass is `last`.
Launches plan(const Source& source, const QuantizeTraits& traits, QuantizePass last) {
  Launches out{source};
  Source& s = out.source;
  s.casts = last == QuantizePass::kCast;
  s.measures = !s.casts || (traits.measures_first && !traits.row_scaled);
  const bool single = s.kind == Source::Kind::kSingle, groups = s.kind == Source::Kind::kGroups;
  const int64_t several = tiles_a_block(s);
  s.run = single ? 1 : several;
  const auto blocks = [&](int64_t tiles) {
    return std::min(blocks_for(s.tiles, tiles), kMostBlocks);
  };
  if (s.measures || traits.delayed || groups) {
    const bool many = s.kind == Source::Kind::kMany;
    out.add("quantize", begin_jobs, many ? blocks_for(s.count, device::kThreads) : 1);
  }
  if (s.measures) {
    const QuantizeLaunch& measure = launch_of(QuantizePass::kMeasure, traits);
    out.add("compute_amax", measure.kernel, blocks(several));
  }
  if (s.casts) {
    const QuantizeLaunch& cast = launch_of(QuantizePass::kCast, traits);
    if (single) s.run = cast.run;
    out.add("quantize", cast.kernel, single ? blocks_for(blocks(1), cast.run) : blocks(several),
            cast.shared_bytes);
  }
  return out;
}

}  // namespace

namespace {

void run(const Launches& launches, const Stream& stream) {
  for (const auto& one : launches.each()) {
    launch(one.name, one.kernel, one.shape, stream, launches.source);
  }
}

}  // namespace

void quantize_cuda(const QuantizeJob& job, const RowGroups* groups, QuantizePass last,
                   const Stream& stream) {
  run(plan(groups ? grouped(job, *groups) : single(job), traits_of(job), last), stream);
}

void requantize_cuda(const QuantizeJob& job, const RowGroups* groups, const DequantizeJob& rows,
                     const Stream& stream) {
  Source source = groups ? grouped(job, *groups) : single(job);
  source.coded = rows;
  QuantizeTraits traits = traits_of(job);
  traits.coded = true;
  run(plan(source, traits, QuantizePass::kCast), stream);
}

// Jobs that the same kernels serve, in one launch per pass.
struct QuantizeTable::Device {
  struct Batch {
    Buffer jobs, first_tile;
    Launches launches;
  };
  std::vector<Batch> batches;
};

namespace {

QuantizeTable::Device::Batch make_batch(const std::vector<QuantizeJob>& jobs,
                                        const Stream& stream) {
  QuantizeTable::Device::Batch batch;
  const QuantizeJob& like = jobs.front();
  Source s;
  s.kind = Source::Kind::kMany;
  s.tiling = tiling_of(like.spec.row_scaled);
  s.skip = like.skip;
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
  batch.launches = plan(s, traits_of(like), QuantizePass::kCast);
  return batch;
}

}  // namespace

std::shared_ptr<const QuantizeTable::Device> make_device_table(std::span<const QuantizeJob> jobs,
                                                               moiety::Device device) {
  std::vector<std::vector<QuantizeJob>> groups;
  for (const QuantizeJob& job : jobs) {
    const auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& g) {
      return traits_of(g.front()) == traits_of(job);
    });
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
  for (const auto& batch : table.batches) run(batch.launches, stream);
}

}  // namespace moiety::quant
