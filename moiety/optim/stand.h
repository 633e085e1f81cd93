// How long a stream of a GPU stands at a wait for another one, measured there.
#pragma once

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"

namespace moiety::optim {

// `clock` is uint64 [2] on the GPU, zero at first. What is enqueued between the two calls is the
// wait; its nanoseconds are added up.
void begin_stand_cuda(TensorView clock, const Stream& stream);
void end_stand_cuda(TensorView clock, const Stream& stream);
// *to, float64 on the GPU, := the sum, which begins anew.
void take_stands_cuda(TensorView clock, double* to, const Stream& stream);

}  // namespace moiety::optim
