// Moves and fills bytes, in the order of a stream.
#pragma once

#include <cstdint>

#include "moiety/base/buffer.h"
#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"

namespace moiety {

// dst = src, bit for bit (the order of memcpy). Equal dtypes and sizes; each is a run of rows,
// contiguous but for the stride of its first dimension. They do not overlap.
//
// On a CPU stream both are in host memory; on a GPU's stream each may be on that GPU, on another
// one, or in host memory. Host memory that is not pinned makes the host wait, and cannot be in a
// captured graph; pinned memory must stay as it is until the stream has come past.
void copy(TensorView dst, TensorView src, Stream stream);

// A copy in the host's memory, which is there when this returns: it waits for the stream.
Tensor to_host(TensorView src, const Stream& stream);

// Sets every byte of the tensor's elements, laid out as above. On a GPU's stream dst is on that
// GPU.
void fill_bytes(TensorView dst, uint8_t value, Stream stream);

}  // namespace moiety
