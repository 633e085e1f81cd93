// Measurements of the machine, for MFU and memory.
#pragma once

#include "moiety/base/dtype.h"

namespace moiety::train {

// The TFLOP/s of a matrix product of float32 or bfloat16 on the calling thread's budget of cores:
// the best within about `seconds`.
double measured_tflops(DType dtype, double seconds = 0.2);

// Bytes of this process in its address space and in memory, and of the machine's memory.
double mapped_bytes();
double resident_bytes();
double machine_bytes();

}  // namespace moiety::train
