// A part of a QuantizeJob that one thread does at a time. Internal to moiety/quant.
#pragma once

#include "moiety/quant/convert/dequantize_job.h"
#include "moiety/quant/quantize/quantize_job.h"

namespace moiety::quant {

// Rows [r0, r1), at most 128 of them, and columns [c0, c1); both begin at a multiple of 128, and
// columns end at one or at the end. If only rows are asked for, and not in tiles, a task may have
// any whole rows.
struct QuantizeTask {
  const QuantizeJob* job;
  int64_t r0, r1, c0, c1;
};

// The largest |x| (as bits) of a task's elements, of X and rotated.
uint32_t measure_task(const QuantizeTask& task);
uint32_t measure_rotated_task(const QuantizeTask& task);
// Writes codes and scales of the task's blocks and, for row-scaled jobs, the scalars of its rows.
// Returns the largest amax (as bits) that was met.
uint32_t cast_task(const QuantizeTask& task);

// quantize_* of jobs whose X is not there but quantized: in bf16 it would be the values of `rows`,
// from which the arrays are made. job.x is where it would be, if row 0 of `rows` were at `first`.
void requantize_reference(const QuantizeJob& job, const DequantizeJob& rows, const void* first);
void requantize_cpu(std::span<const QuantizeJob> jobs, const DequantizeJob& rows,
                    const void* first);

}  // namespace moiety::quant
