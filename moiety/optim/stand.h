// What a GPU finds out by itself about what ranks do together: how long a stream stands at a wait for
// another one, and that a wait for a peer has failed.
#pragma once

#include <cstdint>

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"

namespace moiety::optim {

// `clock` is uint64 [2] on the GPU, zero at first. What is enqueued between the two calls is the
// wait; its nanoseconds are added up.
void begin_stand_cuda(TensorView clock, const Stream& stream);
void end_stand_cuda(TensorView clock, const Stream& stream);
// *to, float64 on the GPU, := the sum, which begins anew.
void take_stands_cuda(TensorView clock, double* to, const Stream& stream);

// *skip, on the GPU, := 1 if a word is not 0 of which `addresses`, uint64 [n], has the addresses.
void skip_on_fault_cuda(TensorView addresses, int32_t* skip, const Stream& stream);

}  // namespace moiety::optim
