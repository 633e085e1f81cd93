// Memory of equal size on every rank of a group that all of its ranks can load from and store to;
// it is zeroed and its base is aligned to 4 KiB, on a GPU to 2 MiB. A rank reaches a peer's memory
// through `peer(r)`. Ranks synchronize with words in it (release stores and acquire loads, flags.h);
// there are no remote atomics.
//
// Ranks that are threads of one process share heap memory, or the memory of their GPUs in one range
// of addresses (docs/gpu.md). Ranks that are processes of one host map each other's memory: memfd, or
// memory of their GPUs, handed over through unix sockets (comm/memory_exchange.h). Ranks of
// several hosts, or in different network namespaces, cannot: ask `mappable` first.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "moiety/comm/communicator.h"

namespace moiety::comm {

// Whether the ranks can map each other's memory: the same answer on every rank. Collective the
// first time for a communicator; later calls return the answer found then. If false, rank 0 of the
// group logs the reason and the group uses collectives instead. Threads can always, unless the
// group's options say map_memory = false. Throws what `create` throws except for that. `device` is
// where the memory would be: a CPU, or the rank's GPU.
bool mappable(Communicator& comm, Device device = {});

class SymmetricBuffer {
 public:
  SymmetricBuffer() = default;

  // Makes a buffer. Collective. If one rank fails, every rank throws the same Error(kComm or
  // kOutOfMemory) naming the buffer and that rank: `symmetric buffer "moe": rank 2 could not
  // allocate ...`. If the group is not mappable, Error(kUnsupported) with the reason.
  //
  // `device` is where this rank's memory is: CPUs for all ranks, or a GPU for each; two ranks may
  // share one. Memory of a GPU is taken in pieces of 2 MiB. Creating and letting go of it may wait
  // for the GPU, so neither belongs into a step.
  static SymmetricBuffer create(Communicator& comm, const std::string& name, int64_t bytes,
                                Device device = {});
  // Takes memory that something else has made symmetric: `peers` by rank, of `bytes` bytes each,
  // which live as long as `keep_alive` does. Not collective; nothing is checked.
  static SymmetricBuffer adopt(Communicator& comm, std::vector<std::byte*> peers, int64_t bytes,
                               std::shared_ptr<void> keep_alive, Device device = {});
  // The same memory by the ranks of a sub-group. Collective among them; Error(kInvalidArgument) if
  // a rank of `sub` is not a rank of this buffer.
  SymmetricBuffer view(Communicator& sub) const;

  std::byte* local() const;
  std::byte* peer(int rank) const;
  int64_t bytes() const;
  int ranks() const;
  Device device() const;
  bool contains(const void* p, int64_t bytes) const;
  explicit operator bool() const { return impl_ != nullptr; }

  // Waits until all ranks are here, and on a GPU for its work so far, so that nobody uses the buffer
  // any more, then lets go of it.
  // Collective. Copies of this handle, and the destructor, let go without waiting: the memory lives
  // until its last user among the ranks has let go, so stores of a late peer always have a place to
  // land.
  void close();

 private:
  friend class AttachedBuffers;  // moiety/comm/mapped/attached.h
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace moiety::comm
