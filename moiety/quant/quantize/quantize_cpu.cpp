// Quantization on CPUs. Jobs are cut into tasks over the cores: first tasks that measure, then
// tasks that cast, then scalars.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <vector>

#include "moiety/base/integer.h"
#include "moiety/base/parallel.h"
#include "moiety/formats/bf16.h"
#include "moiety/formats/e5m2.h"
#include "moiety/quant/amax_sink.h"
#include "moiety/quant/quantize/ieee_scope.h"
#include "moiety/quant/quantize/quantize_task.h"
#include "moiety/quant/quantize/stream_bytes.h"
#include "moiety/quant/scale_math.h"

namespace moiety::quant {
namespace {

constexpr int64_t kTaskRows = 128;
constexpr int64_t kTaskCols = 2048;
constexpr int64_t kRowElements = 1 << 16;  // elements of a task of whole rows

// The way in which a job is cut.
struct Cut {
  int64_t rows, cols;  // rows and columns of a task

  static Cut of(const QuantizeJob& job) {
    if (job.want_col) return {kTaskRows, kTaskCols};
    if (is_tile(job.spec.format)) return {block_shape(job.spec.format).rows, kTaskCols};
    // Whole rows, since memory is read fastest in the order in which it lies.
    const int64_t cols = std::max<int64_t>(job.cols, 1);
    return {std::clamp<int64_t>(kRowElements / cols, 1, kTaskRows), cols};
  }
  int64_t tasks(const QuantizeJob& job) const {
    // Rows without columns still have scalars if each row is scaled by itself.
    const int64_t across =
        ceil_div(job.spec.row_scaled ? std::max<int64_t>(job.cols, 1) : job.cols, cols);
    return ceil_div(job.rows, rows) * across;
  }
  QuantizeTask task(const QuantizeJob& job, int64_t i) const {
    const int64_t across = std::max<int64_t>(1, ceil_div(job.cols, cols));
    const int64_t r = i / across * rows, c = i % across * cols;
    return {&job, r, std::min(job.rows, r + rows), c, std::min(job.cols, c + cols)};
  }
};

// Calls body(task) for every task of the jobs that `wanted` chooses.
template <class Wanted, class Body>
void for_tasks(std::span<const QuantizeJob> jobs, Wanted&& wanted, Body&& body) {
  thread_local std::vector<int64_t> ends_memory;
  std::vector<int64_t>& ends = ends_memory;  // the worker threads read the vector of this thread
  ends.clear();
  int64_t total = 0;
  for (const QuantizeJob& job : jobs) {
    if (wanted(job)) total += Cut::of(job).tasks(job);
    ends.push_back(total);
  }
  parallel_tasks(total, [&](int64_t i) {
    const size_t j =
        static_cast<size_t>(std::upper_bound(ends.begin(), ends.end(), i) - ends.begin());
    const IeeeScope scope;
    body(Cut::of(jobs[j]).task(jobs[j], i - (j ? ends[j - 1] : 0)));
  });
}

void set_flag(const QuantizeJob& job, uint32_t amax) {
  if (!job.flags || amax < 0x7F800000u) return;
  std::atomic_ref<uint32_t>(*job.flags).fetch_or(kFlagNonFinite, std::memory_order_relaxed);
}

void measure(const QuantizeTask& task) {
  const QuantizeJob& job = *task.job;
  if (job.spec.row_scaled) {
    for (int64_t r = task.r0; r < task.r1; ++r) {
      const uint32_t amax = measure_task({&job, r, r + 1, task.c0, task.c1});
      job.amax[0][r] = std::bit_cast<float>(amax);
    }
    return;
  }
  const bool own_col = job.want_col && job.spec.rht_col;
  // One band at a time, so that the transform finds it in the cache.
  const int64_t band = own_col ? 16 : kTaskRows;
  uint32_t plain = 0, rotated = 0;
  for (int64_t r = task.r0; r < task.r1; r += band) {
    const QuantizeTask part{&job, r, std::min(task.r1, r + band), task.c0, task.c1};
    if (job.want_row || !own_col) plain = std::max(plain, measure_task(part));
    if (own_col) rotated = std::max(rotated, measure_rotated_task(part));
  }
  raise_amax(job.amax[job.want_row ? 0 : 1], plain);
  if (own_col) raise_amax(job.amax[1], rotated);
}

// Both directions have the amax of X, unless col is rotated.
void share_amax(const QuantizeJob& job) {
  if (!job.spec.row_scaled && job.want_row && job.want_col && !job.spec.rht_col) {
    *job.amax[1] = *job.amax[0];
  }
}

void clear_amax(const QuantizeJob& job) {
  if (job.spec.row_scaled) return;
  if (job.want_row) *job.amax[0] = 0;
  if (job.want_col) *job.amax[1] = 0;
}

// over(task, body) calls the body with a task whose X is there.
template <class Wanted, class Over>
void measure_all(std::span<const QuantizeJob> jobs, Wanted&& wanted, Over&& over) {
  for (const QuantizeJob& job : jobs) {
    if (wanted(job)) clear_amax(job);
  }
  for_tasks(jobs, wanted, [&](const QuantizeTask& task) { over(task, measure); });
  for (const QuantizeJob& job : jobs) {
    if (wanted(job)) share_amax(job);
  }
}

void clear(uint8_t* at, int64_t bytes) { std::memset(at, 0, static_cast<size_t>(bytes)); }

// Clears the rows past the end that the MXFP8 col arrays of a group have, in the task's columns.
void clear_pads(const QuantizeTask& task) {
  const QuantizeJob& job = *task.job;
  if (job.spec.format != Format::kMxfp8 || !job.col.data || task.r1 != job.rows) return;
  auto* scales = static_cast<uint8_t*>(job.col.scales);
  const int64_t cols = task.c1 - task.c0;
  for (int64_t r = job.rows; r < job.padded_rows; ++r) {
    clear(job.col.data + r * job.col.pitch + task.c0, cols);
  }
  for (int64_t b = ceil_div(job.rows, 32); b < job.padded_rows / 32; ++b) {
    clear(scales + b * job.col.scale_pitch + task.c0, cols);
  }
}

void run_task(const QuantizeTask& task) {
  const QuantizeJob& job = *task.job;
  const uint32_t amax = cast_task(task);
  ByteWriter::finish();
  clear_pads(task);
  set_flag(job, amax);
  if (!job.delayed_scale) return;
  raise_amax(job.step_amax, amax);
  if (job.want_row) raise_amax(job.amax[0], amax);
  if (job.want_col) raise_amax(job.amax[1], amax);
}

float decode_scale(const QuantizeJob& job, float amax) {
  if (is_fp4(job.spec.format)) return nvfp4_tensor_scale(amax).decode;
  if (job.spec.format != Format::kFp8Tensor) return 1;
  if (job.delayed_scale) return *job.delayed_scale_inv;
  const float fp8_max = fp8_max_of(job.spec.element);
  return fp8_scale(amax, fp8_max, job.spec.amax_floor, job.spec.pow2_scales).decode;
}

void store_scalars(const QuantizeJob& job) {
  if (job.spec.row_scaled) return;
  for (const Direction d : {Direction::kRow, Direction::kCol}) {
    const int i = d == Direction::kCol;
    if (!(i == 0 ? job.want_row : job.want_col)) continue;
    const bool uses_amax = job.amax[0] && !job.delayed_scale;
    const float amax = uses_amax ? *job.amax[job.amax_index(d)] : 0;
    if (job.tensor_scale[i]) *job.tensor_scale[i] = decode_scale(job, amax);
    if (uses_amax) *job.amax[i] = amax;
    set_flag(job, abs_bits(amax));
  }
}

bool skipped(std::span<const QuantizeJob> jobs) { return jobs.empty() || jobs[0].skipped(); }

template <class Over>
void quantize_all(std::span<const QuantizeJob> jobs, Over&& over) {
  if (skipped(jobs)) return;
  // The amax of a row is measured where the row is cast.
  const auto first = [](const QuantizeJob& job) {
    return job.measures_first() && !job.spec.row_scaled;
  };
  measure_all(jobs, first, over);
  for (const QuantizeJob& job : jobs) {
    if (job.delayed_scale) clear_amax(job);
  }
  for_tasks(
      jobs, [](const QuantizeJob&) { return true; },
      [&](const QuantizeTask& task) { over(task, run_task); });
  const IeeeScope scope;
  for (const QuantizeJob& job : jobs) store_scalars(job);
}

constexpr auto kInPlace = [](const QuantizeTask& task, auto&& body) { body(task); };

// The row of `first` at which a job whose X is not there begins.
int64_t first_row(const QuantizeJob& job, const void* first) {
  const int64_t bytes = byte_size(job.dtype, job.stride);
  return bytes == 0 ? 0
                    : static_cast<int64_t>(reinterpret_cast<uintptr_t>(job.x) -
                                           reinterpret_cast<uintptr_t>(first)) /
                          bytes;
}

// The values of `rows` rows from row r on and of `cols` columns from column c on, a multiple of
// 128, written to `out` without gaps.
DequantizeJob part_of(DequantizeJob job, int64_t r, int64_t rows, int64_t c, int64_t cols,
                      bf16* out) {
  job.codes += r * job.pitch + (is_fp4(job.spec.format) ? c / 2 : c);
  const int64_t scale = r * job.row_stride + c / job.block_cols * job.col_stride;
  job.scales = static_cast<const std::byte*>(job.scales) +
               (is_fp8_block(job.spec.format) ? scale * int64_t{sizeof(float)} : scale);
  if (job.tensor_scale) job.tensor_scale += r * job.tensor_stride;
  job.rows = rows;
  job.cols = job.out_cols = job.out_stride = cols;
  job.out = out;
  return job;
}

}  // namespace

void measure_cpu(std::span<const QuantizeJob> jobs) {
  if (!skipped(jobs))
    measure_all(
        jobs, [](const QuantizeJob&) { return true; }, kInPlace);
}

void quantize_cpu(std::span<const QuantizeJob> jobs) { quantize_all(jobs, kInPlace); }

void requantize_cpu(std::span<const QuantizeJob> jobs, const DequantizeJob& rows,
                    const void* first) {
  quantize_all(jobs, [&](const QuantizeTask& task, auto&& body) {
    thread_local std::vector<bf16> values;
    const int64_t height = task.r1 - task.r0, width = task.c1 - task.c0;
    values.resize(static_cast<size_t>(height * width));
    const int64_t row = first_row(*task.job, first) + task.r0;
    dequantize_cpu(part_of(rows, row, height, task.c0, width, values.data()));
    QuantizeJob job = *task.job;
    job.stride = width;
    job.x = reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(values.data()) -
                                          byte_size(job.dtype, task.r0 * width + task.c0));
    body(QuantizeTask{&job, task.r0, task.r1, task.c0, task.c1});
  });
}

void requantize_reference(const QuantizeJob& job, const DequantizeJob& rows, const void* first) {
  std::vector<bf16> values(static_cast<size_t>(job.rows * job.cols));
  dequantize_reference(part_of(rows, first_row(job, first), job.rows, 0, job.cols, values.data()));
  QuantizeJob there = job;
  there.x = values.data();
  there.stride = job.cols;
  quantize_reference(there);
}

}  // namespace moiety::quant
