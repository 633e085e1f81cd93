// Memory through which the ranks of a tensor-parallel group on GPUs read each other's operands
// (tensor_parallel.h): those that are computed there travel without a copy, and whoever reads them
// puts them where they belong, or adds them, at once.
//
// An operation takes one of two halves in turns: its operand is written there, the ranks meet, and
// the peers read it. One meeting is enough, since whoever has come to a meeting has read what the
// operation before it brought. The first operation of a pass takes the first half whatever the last
// pass ended with, so that a captured step may be replayed; a pass begins with a meeting.
#pragma once

#include <cstddef>
#include <vector>

#include "moiety/base/stream.h"
#include "moiety/comm/symmetric_buffer.h"

namespace moiety::model {

class TpWindow {
 public:
  TpWindow(comm::Communicator& tp, Device gpu) : tp_(tp), gpu_(gpu) {}

  // Begins a pass whose operands have at most `bytes` bytes. Collective. Takes memory where there is
  // too little, so in a capture there has been such a pass before.
  void begin(int64_t bytes, const Stream& stream);

  // Whether an operand goes through the window, of which a rank's part has so many bytes: small ones
  // are better off with the communicator, which has the others too where ranks cannot map memory.
  bool takes(int64_t part_bytes, int64_t bytes) const {
    return part_bytes > kSmall && bytes <= half_;
  }
  // The memory of the next operation, aligned to 256 bytes.
  std::byte* take();
  bool holds(const void* p) const { return !memory_.empty() && memory_.back().contains(p, 1); }
  // Where rank r has what lies at p here.
  const std::byte* at_rank(int r, const void* p) const;
  // In the order of the stream: what all ranks have done before is there.
  void meet(const Stream& stream) const;

 private:
  static constexpr int64_t kSmall = 16 << 10;

  comm::Communicator& tp_;
  Device gpu_;
  // The last one is used. Steps that were captured read the others.
  std::vector<comm::SymmetricBuffer> memory_;
  int64_t half_ = 0;
  int next_ = 0;
};

}  // namespace moiety::model
