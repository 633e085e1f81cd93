// transpose_quantized on GPUs. Internal to moiety/quant.
#pragma once

#include <memory>
#include <span>

#include "moiety/base/stream.h"
#include "moiety/quant/convert/transpose_job.h"

namespace moiety::quant {

// Jobs on a GPU.
struct TransposeTable;
std::shared_ptr<const TransposeTable> make_transpose_table(std::span<const TransposeJob> jobs,
                                                           Device device);
void transpose_cuda(const TransposeTable& table, const Stream& stream);

}  // namespace moiety::quant
