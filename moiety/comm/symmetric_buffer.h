// Memory of equal size on every rank of a group that all of its ranks can load from and store to;
// it is zeroed and its base is aligned to 4 KiB. A rank reaches a peer's memory through `peer(r)`.
// Ranks synchronize with words in it (release stores and acquire loads, flags.h); there are no
// remote atomics.
//
// Ranks that are threads of one process share heap memory. Ranks that are processes of one host map
// each other's memory (memfd, handed over through unix sockets: comm/memory_exchange.h). Ranks of
// several hosts, or in different network namespaces, cannot: ask `mappable` first.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "moiety/comm/communicator.h"

namespace moiety::comm {

// Whether the ranks can map each other's memory: the same answer on every rank. Collective the
// first time for a communicator; later calls return the answer found then. If false, rank 0 of the
// group logs the reason and the group uses collectives instead. Threads can always, unless the
// group's options say map_memory = false. Throws what `create` throws except for that.
bool mappable(Communicator& comm);

class SymmetricBuffer {
 public:
  SymmetricBuffer() = default;

  // Makes a buffer. Collective. If one rank fails, every rank throws the same Error(kComm or
  // kOutOfMemory) naming the buffer and that rank: `symmetric buffer "moe": rank 2 could not
  // allocate ...`. If the group is not mappable, Error(kUnsupported) with the reason.
  static SymmetricBuffer create(Communicator& comm, const std::string& name, int64_t bytes);

  std::byte* local() const;
  std::byte* peer(int rank) const;
  int64_t bytes() const;
  bool contains(const void* p, int64_t bytes) const;
  explicit operator bool() const { return impl_ != nullptr; }

  // Waits until all ranks are here, so that nobody uses the buffer any more, then lets go of it.
  // Collective. Copies of this handle, and the destructor, let go without waiting: the memory lives
  // until its last user among the ranks has let go, so stores of a late peer always have a place to
  // land.
  void close();

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace moiety::comm
