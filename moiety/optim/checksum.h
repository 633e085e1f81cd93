// A checksum of memory on a GPU, by which ranks compare what should be the same bytes.
#pragma once

#include <cstdint>

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"

namespace moiety::optim {

// *sum, on the GPU, += a number that depends on all bytes of x and their places. x begins at a
// multiple of 8 and has a multiple of 8 bytes. Sums are taken modulo 2^64, so their order is free.
void add_checksum_cuda(TensorView x, uint64_t* sum, const Stream& stream);

}  // namespace moiety::optim
