// The partial cast on GPUs. Internal to moiety/quant.
#pragma once

#include <cstddef>
#include <memory>

#include "moiety/quant/partial_cast/partial_cast_plan.h"

namespace moiety::quant::detail {

// The items, arrays and pieces of work of a table, on a GPU.
struct PartialGpuTable;
std::shared_ptr<const PartialGpuTable> make_partial_gpu_table(const PartialCastTable::Impl& table,
                                                              Device device);

// Phase 1, which also zeroes `reduction`.
void partial_amax_cuda(const PartialGpuTable& table, const TensorView& reduction,
                       const Stream& stream);
void partial_cast_cuda(const PartialGpuTable& table, const TensorView& reduction,
                       const Stream& stream);

}  // namespace moiety::quant::detail
