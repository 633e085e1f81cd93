// Kernels to try streams with.
#pragma once

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"

namespace moiety {

// x += 1; int32, contiguous.
void add_one(TensorView x, Stream stream);
// x += *amount, read on the GPU.
void add_amount(TensorView x, TensorView amount, Stream stream);
// Keeps the stream busy for so many cycles.
void spin(int64_t cycles, Stream stream);
// One thread a block adds 1 to its element of x.
void mark_blocks(TensorView x, int64_t blocks, int64_t shared_bytes, Stream stream);
// The same, by a kernel that nobody else launches.
void mark_blocks_again(TensorView x, int64_t blocks, int64_t shared_bytes, Stream stream);
int64_t resident_mark_blocks(int64_t shared_bytes, const Stream& stream);
void launch_too_many_threads(TensorView x, Stream stream);

// *wrong += how many floats d from 1 to 2 have another 1 / d than the GPU's division.
void count_wrong_reciprocals(TensorView wrong, Stream stream);

// A cudaStream_t that the library does not own.
void* make_cuda_stream();
bool destroy_cuda_stream(void* stream);

}  // namespace moiety
