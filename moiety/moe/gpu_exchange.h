// What the exchange of experts on GPUs has beside its operations.
#pragma once

#include "moiety/base/stream.h"
#include "moiety/base/tensor_view.h"

namespace moiety::moe {

class EpGroup;

// The stream of exchanges that have something beside them (ep.overlap). On a GPU the same one for
// all callers; on a CPU a new one, which runs exchanges when their results are asked for.
Stream side_stream(EpGroup& group);

// The nanoseconds that this rank's operations have waited for peers so far while nothing ran beside
// them, int64 [1] on the GPU, in stream order; absent on CPUs, where the host waits, and in a group of
// one rank.
TensorView waited_ns(const EpGroup& group);

// Something runs beside the group's operations that follow on `side`, until `main`, the stream of
// that, comes to end_beside. Nothing where there is no such count.
void begin_beside(EpGroup& group, const Stream& side);
void end_beside(EpGroup& group, const Stream& main);

// The most multiprocessors that products take beside an exchange: those that its blocks which push
// rows leave where EpOptions::comm_sms is given; else 0, all of them, and so on CPUs and in a group of
// one rank.
int sms_beside(const EpGroup& group);

}  // namespace moiety::moe
