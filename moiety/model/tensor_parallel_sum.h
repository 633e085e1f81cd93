// The sum of ranks' parts on a GPU (tensor_parallel.h).
#pragma once

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"

namespace moiety::model {

// out = round(the parts of `ranks` ranks, added in order, + addend), with the bits of the CPU. The
// addend may be absent, or out; each is float32 or bfloat16.
void add_parts_cuda(TensorView parts, int64_t ranks, TensorView addend, TensorView out,
                    const Stream& stream);

}  // namespace moiety::model
