// Work of several blocks between two meetings, in one kernel.
#pragma once

#include "moiety/comm/mapped/wait_device.cuh"

namespace moiety::comm::mapped {

// Every block leaves the same words and waits for the peers', so none waits for another one of its
// grid. The block that comes last counts the meeting; with `leave` it meets the peers again, who then
// know that the work is done. Of work to which a peer has not come nothing is done.
// Nothing that the meetings need is kept in registers over the work, which takes all there are.
template <class Work>
__device__ void join_meetings(const Region& region, const Meeting& meeting, bool leave,
                              Work&& work) {
  __shared__ bool last;
  Control& control = *region.control;
  const int peer = threadIdx.x;
  const bool meets = peer < region.ranks && (meeting.peers >> peer & 1);
  // Meets the peer for the k-th time in this kernel.
  const auto meet_peer = [&](int k) {
    const uint64_t begun = nanoseconds(), count = control.counts[peer] + k;
    const PairCall call = call_with(meeting, peer);
    post(region, call, peer, count);
    return wait_for(region, call, peer, count, control.operation + meeting.first, begun);
  };
  uint64_t begun = nanoseconds();
  if (__syncthreads_and(!meets || meet_peer(1))) {
    if (blockIdx.x == 0 && threadIdx.x == 0) control.waited_ns += nanoseconds() - begun;
    work();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();  // peers see what this block has stored there
    last = atomicAdd(&control.finished, 1u) + 1 == gridDim.x;
    __threadfence();
  }
  __syncthreads();
  if (!last) return;
  begun = nanoseconds();
  if (meets && leave) meet_peer(2);
  if (meets) control.counts[peer] += leave ? 2 : 1;
  __syncthreads();
  if (threadIdx.x != 0) return;
  control.operation += meeting.first;
  control.finished = control.drawn = 0;
  control.waited_ns += nanoseconds() - begun;
}

}  // namespace moiety::comm::mapped
