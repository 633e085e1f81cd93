#include "moiety/quant/quantize/quantize_job.h"

#include <utility>
#include <vector>

#include "moiety/base/gpu.h"
#include "moiety/quant/quantize_group.h"

namespace moiety::quant {
namespace {

void check_input(const char* operation, const TensorView& x, const QuantizedView& out) {
  MOIETY_CHECK(x.defined() && x.dims() == 2 &&
                   (x.dtype() == DType::kFloat32 || x.dtype() == DType::kBFloat16),
               "{}: x is {}, expected a matrix of float32 or bfloat16", operation, x.describe());
  MOIETY_CHECK(x.size(0) == out.rows && x.size(1) == out.cols,
               "{}: x is {}, the output is [{}, {}]", operation, x.describe(), out.rows, out.cols);
  MOIETY_CHECK(x.stride(1) == 1 || x.size(1) <= 1, "{}: x is {}, expected columns without gaps",
               operation, x.describe());
  MOIETY_CHECK(x.size(0) <= 1 || x.stride(0) >= x.size(1),
               "{}: x is {}, expected rows that do not overlap", operation, x.describe());
}

// Checks that every array is on the device of x. The place of options.rng cannot be found out.
void check_place(const char* operation, const TensorView& x, const QuantizedView& out,
                 const QuantizeOptions& options) {
  const auto check = [&](const char* argument, const TensorView& view) {
    MOIETY_CHECK(!view.defined() || view.device() == x.device(), "{}: {} is {}, but x is on {}",
                 operation, argument, view.describe(), name(x.device()));
  };
  require_device(operation, x.device());
  check("row_data", out.row_data);
  check("row_scales", out.row_scales);
  check("col_data", out.col_data);
  check("col_scales", out.col_scales);
  check("amax", out.amax);
  check("tensor_scale", out.tensor_scale);
  check("flags", out.flags);
  check("skip", options.skip);
  if (!options.delayed) return;
  check("delayed.scale", options.delayed->scale);
  check("delayed.scale_inv", options.delayed->scale_inv);
  check("delayed.step_amax", options.delayed->step_amax);
}

void check_scaling(const char* operation, const QuantizedView& out, const QuantizeOptions& options,
                   int64_t scales) {
  const Format format = out.spec.format;
  if (is_tensor_scaled(format)) {
    MOIETY_CHECK(out.amax.defined() && out.tensor_scale.defined(),
                 "{}: {} needs amax and tensor_scale", operation, name(format));
  }
  MOIETY_CHECK(!options.amax_given || is_tensor_scaled(format),
               "{}: amax_given with {}, which has none", operation, name(format));
  if (!options.delayed) return;
  MOIETY_CHECK(format == Format::kFp8Tensor, "{}: delayed scaling of {}", operation, name(format));
  MOIETY_CHECK(!options.amax_given, "{}: both amax_given and delayed", operation);
  for (const auto& [argument, view] :
       {std::pair{"delayed.scale", &options.delayed->scale},
        std::pair{"delayed.scale_inv", &options.delayed->scale_inv},
        std::pair{"delayed.step_amax", &options.delayed->step_amax}}) {
    check_tensor(operation, argument, *view, DType::kFloat32, {scales});
  }
}

void check_position(const char* operation, const QuantizeJob& job) {
  MOIETY_CHECK(job.row0 >= 0 && job.col0 >= 0 && job.row0 <= job.full_rows - job.rows &&
                   job.col0 <= job.full_cols - job.cols,
               "{}: [{}, {}] from row0={}, col0={} is not within full_rows={}, full_cols={}",
               operation, job.rows, job.cols, job.row0, job.col0, job.full_rows, job.full_cols);
  MOIETY_CHECK(job.col0 % 16 == 0, "{}: col0={} must be a multiple of 16", operation, job.col0);
  MOIETY_CHECK(!job.want_col || job.row0 % 16 == 0,
               "{}: row0={} must be a multiple of 16 for the col direction", operation, job.row0);
  if (!job.stochastic()) return;
  MOIETY_CHECK(job.rng, "{}: stochastic rounding without rng", operation);
  MOIETY_CHECK(job.expert < 1u << 16, "{}: expert={}, at most 65535", operation, job.expert);
  const int64_t limit = int64_t{1} << 47;
  MOIETY_CHECK(job.full_rows <= limit && job.full_cols <= limit &&
                   (job.full_cols == 0 || job.full_rows <= limit / ((job.full_cols + 15) / 16)) &&
                   (job.full_rows == 0 || job.full_cols <= limit / ((job.full_rows + 15) / 16)),
               "{}: [{}, {}] has more than 2^47 blocks", operation, job.full_rows, job.full_cols);
}

QuantizeOutput output_of(const TensorView& data, const TensorView& scales) {
  QuantizeOutput out;
  out.data = static_cast<uint8_t*>(data.raw());
  out.scales = scales.raw();
  if (data.defined()) out.pitch = byte_size(data.dtype(), data.size(1));
  if (scales.defined()) out.scale_pitch = scales.size(1);
  return out;
}

void check_alignment(const char* operation, const QuantizedView& out) {
  for (const auto& [argument, view] :
       {std::pair{"row_data", &out.row_data}, std::pair{"row_scales", &out.row_scales},
        std::pair{"col_data", &out.col_data}, std::pair{"col_scales", &out.col_scales}}) {
    MOIETY_CHECK(reinterpret_cast<uintptr_t>(view->raw()) % 16 == 0,
                 "{}: {} is not aligned to 16 bytes", operation, argument);
  }
}

// Sets the directions that `out` asks for, and checks that they are complete.
void set_directions(const char* operation, const QuantizedView& out, QuantizeJob* job) {
  const QuantSpec& spec = out.spec;
  const bool tile = is_tile(spec.format), has_scales = spec.format != Format::kFp8Tensor;
  job->want_row = out.row_data.defined();
  job->want_col = out.col_data.defined() || (spec.format == Format::kMxfp8Tile32 && job->want_row);
  MOIETY_CHECK(job->want_row || job->want_col, "{}: neither row_data nor col_data is given",
               operation);
  MOIETY_CHECK(out.layout == ScaleLayout::kCompact, "{}: scales are {}, expected compact",
               operation, name(out.layout));
  if (!has_scales) return;
  MOIETY_CHECK(out.row_scales.defined() || !(job->want_row || tile), "{}: row_scales are missing",
               operation);
  MOIETY_CHECK(out.col_scales.defined() || tile || !job->want_col, "{}: col_scales are missing",
               operation);
}

void set_options(const QuantizeOptions& options, QuantizeJob* job) {
  if (options.skip.defined()) job->skip = options.skip.data<uint32_t>();
  job->rng = options.rng;
  job->tensor_id = options.tensor_id;
  job->expert = static_cast<uint32_t>(options.expert);
  job->row0 = options.row0;
  job->col0 = options.col0;
  job->full_rows = options.full_rows ? options.full_rows : job->rows;
  job->full_cols = options.full_cols ? options.full_cols : job->cols;
  job->amax_given = options.amax_given;
  if (!options.delayed) return;
  job->delayed_scale = options.delayed->scale.data<float>();
  job->delayed_scale_inv = options.delayed->scale_inv.data<float>();
  job->step_amax = options.delayed->step_amax.data<float>();
}

// The slots of the two directions are `stride` apart.
void set_slots(const TensorView& view, const QuantSpec& spec, int64_t stride, float* (&slots)[2]) {
  if (!view.defined()) return;
  slots[0] = view.data<float>();
  if (!spec.row_scaled) slots[1] = slots[0] + stride;
}

// Sets everything except the directions. `slots` is the number of scalars of one direction: 1 or
// the number of groups.
QuantizeJob resolve(const char* operation, const TensorView& x, const QuantizedView& out,
                    const QuantizeOptions& options, int64_t slots) {
  check_input(operation, x, out);
  check_place(operation, x, out, options);
  check_scaling(operation, out, options, slots);
  if (options.skip.defined()) {
    check_tensor(operation, "skip", options.skip, DType::kUInt32, {1});
  }
  QuantizeJob job;
  job.spec = out.spec;
  job.x = x.raw();
  job.dtype = x.dtype();
  job.rows = x.size(0);
  job.cols = x.size(1);
  job.stride = x.stride(0);
  job.row = output_of(out.row_data, out.row_scales);
  job.col = output_of(out.col_data, out.col_scales);
  set_slots(out.amax, out.spec, slots, job.amax);
  set_slots(out.tensor_scale, out.spec, slots, job.tensor_scale);
  if (out.flags.defined()) job.flags = out.flags.data<uint32_t>();
  set_options(options, &job);
  return job;
}

void finish(const char* operation, const QuantizedView& out, bool cast, QuantizeJob* job) {
  if (cast) {
    set_directions(operation, out, job);
    check_alignment(operation, out);
    check_position(operation, *job);
    return;
  }
  MOIETY_CHECK(job->amax[0], "{}: {} has no amax to fill in", operation, name(out.spec.format));
  const bool row = out.row_data.defined(), col = out.col_data.defined();
  job->want_row = row || !col || out.spec.row_scaled;
  job->want_col = (col || !row) && !out.spec.row_scaled;
}

}  // namespace

QuantizeJob make_quantize_job(const char* operation, const TensorView& x, const QuantizedView& out,
                              const QuantizeOptions& options, bool cast) {
  check_quantized(operation, out);
  QuantizeJob job = resolve(operation, x, out, options, 1);
  job.padded_rows = job.rows;
  finish(operation, out, cast, &job);
  return job;
}

QuantizeJob make_grouped_job(const char* operation, const TensorView& x, const RowGroups& groups,
                             const QuantizedView& out, const QuantizeOptions& options, bool cast) {
  check_groups(operation, groups);
  for (const auto& [argument, view] :
       {std::pair{"groups.begin_E1", &groups.begin_E1},
        std::pair{"groups.count_E", &groups.count_E}, std::pair{"groups.status", &groups.status}}) {
    MOIETY_CHECK(!view->defined() || view->device() == x.device(), "{}: {} is {}, but x is on {}",
                 operation, argument, view->describe(), name(x.device()));
  }
  if (is_tile(out.spec.format)) {
    fail(ErrorKind::kUnsupported, "{}: {} is for weights, a tensor an expert (quantize_many)",
         operation, name(out.spec.format));
  }
  check_quantized_grouped(operation, out, groups.experts);
  MOIETY_CHECK(groups.capacity == out.rows, "{}: groups have a capacity of {}, the output {} rows",
               operation, groups.capacity, out.rows);
  MOIETY_CHECK(options.row0 == 0 && options.full_rows == 0,
               "{}: row0={}, full_rows={}, but positions are those in a group", operation,
               options.row0, options.full_rows);
  MOIETY_CHECK(options.expert == 0 || options.expert + groups.experts <= 1 << 16,
               "{}: expert={} and {} groups, at most 65535", operation, options.expert,
               groups.experts);
  QuantizeJob job = resolve(operation, x, out, options, groups.experts);
  job.padded_rows = grouped_columns(groups.capacity, groups.experts);
  finish(operation, out, cast, &job);
  return job;
}

std::span<const QuantizeJob> group_jobs(const QuantizeJob& whole, const RowGroups& groups) {
  thread_local std::vector<QuantizeJob> jobs;
  jobs.clear();
  record_faults(groups, OperationId::kQuantizeGrouped);
  int64_t column = 0, end = 0;
  for (int64_t e = 0; e < groups.experts; ++e) {
    RowRange range = group_rows(groups, e);
    // Groups that overlap would race, and ask for more columns than there are.
    if (range.rows > 0 && range.begin < end) {
      record_fault(groups.status, kFaultGroup, OperationId::kQuantizeGrouped, e, range.rows);
      range = {};
    }
    if (range.rows > 0) end = range.begin + range.rows;
    jobs.push_back(group_job(whole, e, range.begin, range.rows, column));
    column += jobs.back().padded_rows;
  }
  return jobs;
}

}  // namespace moiety::quant
