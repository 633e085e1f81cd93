// A part of a QuantizeJob that one thread does at a time. Internal to moiety/quant.
#pragma once

#include "moiety/quant/quantize/quantize_job.h"

namespace moiety::quant {

// Rows [r0, r1), at most 128 from a multiple of 128 on, and columns [c0, c1) from a multiple of 128
// on, to one or to the end. Or, if rows alone are asked for, and not in tiles, any whole rows.
struct QuantizeTask {
  const QuantizeJob* job;
  int64_t r0, r1, c0, c1;
};

// The largest |x| (bits) of a task's elements, of X and rotated.
uint32_t measure_task(const QuantizeTask& task);
uint32_t measure_rotated_task(const QuantizeTask& task);
// Codes and scales of the task's blocks, and, of row-scaled jobs, the scalars of its rows. Returns
// the largest amax (bits) that was met.
uint32_t cast_task(const QuantizeTask& task);

}  // namespace moiety::quant
