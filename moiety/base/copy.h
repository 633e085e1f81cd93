// Copies and fills of bytes, in the order of a stream.
#pragma once

#include <cstdint>

#include "moiety/base/buffer.h"
#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"

namespace moiety {

// dst = src, bit for bit. Both have the same dtype and sizes and do not overlap; each is contiguous
// except for the stride of its first dimension.
//
// On a CPU stream both are in host memory. On a GPU's stream each may be on that GPU, on another
// one, or in host memory. Host memory that is not pinned makes the host wait and cannot be in a
// captured graph; pinned memory must stay as it is until the stream has come past.
void copy(TensorView dst, TensorView src, Stream stream);

// A copy in host memory. The call waits for the stream, so the data are there when it returns.
Tensor to_host(TensorView src, const Stream& stream);

// Sets every byte of the elements of dst, which is laid out as for `copy`. On a GPU's stream dst is
// on that GPU.
void fill_bytes(TensorView dst, uint8_t value, Stream stream);

}  // namespace moiety
