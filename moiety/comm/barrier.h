// A barrier in symmetric memory (docs/spec/ep.md#symmetric-memory): one inbox word per peer and an
// epoch that only grows. Nothing is ever reset, so a barrier may stand in a step that is replayed.
#pragma once

#include <cstdint>
#include <string>

#include "moiety/comm/symmetric_buffer.h"
#include "moiety/comm/wait.h"

namespace moiety::comm {

class Barrier {
 public:
  // Bytes that a barrier of `ranks` ranks takes in a symmetric buffer.
  static int64_t bytes(int ranks) { return int64_t{8} * ranks; }

  // The barrier uses buffer bytes [offset, offset + bytes(comm.size())), which are zero at first;
  // the offset is a multiple of 8 and equal on all ranks. The communicator must outlive the
  // barrier.
  Barrier(Communicator& comm, SymmetricBuffer buffer, int64_t offset, std::string name);

  // Returns when all ranks have arrived; everything they stored before is then visible. Throws
  // Error(kComm): `barrier "moe", epoch 3: rank 0 waited 0.3 s for rank 2 (word at 2)`.
  void arrive_and_wait(const WaitLimits& limits);
  // The same with the deadline of the communicator.
  void arrive_and_wait();

  uint64_t epoch() const { return epoch_; }

 private:
  Communicator* comm_;
  SymmetricBuffer buffer_;
  int64_t offset_;
  std::string name_;
  uint64_t epoch_ = 0;
};

}  // namespace moiety::comm
