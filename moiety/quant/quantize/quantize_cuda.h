// Quantization on GPUs, after the arguments are checked and resolved; the operations are those of
// quantize_job.h. Internal to moiety/quant.
#pragma once

#include <memory>
#include <span>

#include "moiety/quant/convert/dequantize_job.h"
#include "moiety/quant/quantize/quantize_kernel.h"
#include "moiety/quant/quantize/quantize_table.h"

namespace moiety::quant {

// The passes up to `last`: kMeasure gives the amax alone. With `groups` (or null) the job is the
// whole of them.
void quantize_cuda(const QuantizeJob& job, const RowGroups* groups, QuantizePass last,
                   const Stream& stream);

// The passes over values of codes, which are decoded where they are needed: job.x is where bf16
// values of the first row of `rows` would be (requantize.h).
void requantize_cuda(const QuantizeJob& job, const RowGroups* groups, const DequantizeJob& rows,
                     const Stream& stream);

// Copies the jobs to the GPU, sorted by the kernel that serves them.
std::shared_ptr<const QuantizeTable::Device> make_device_table(std::span<const QuantizeJob> jobs,
                                                               moiety::Device device);
void quantize_many_cuda(const QuantizeTable::Device& table, const Stream& stream);

}  // namespace moiety::quant
