// Memory of equal size on every rank of a group that all ranks of the group can load from and store
// to: zeroed, its base aligned to 4 KiB. Peers see it through `peer(r)`. Ranks synchronize with
// words in it (release stores, acquire loads; see flags.h); there are no remote atomics.
//
// Ranks that are threads of one process share heap memory. Ranks that are processes of one host
// map each other's memory (memfd, handed over through unix sockets: comm/memory_exchange.h). Ranks
// of several hosts, or in different network namespaces, cannot: ask `mappable` first.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "moiety/comm/communicator.h"

namespace moiety::comm {

// Collective the first time for a communicator, later a look at what was found then; the same
// answer on every rank. True if the ranks can map each other's memory; else the reason is logged,
// by rank 0 of the group, and the group uses collectives instead. Always true for threads, unless
// the group's options say map_memory = false. Throws what `create` throws, but for that.
bool mappable(Communicator& comm);

class SymmetricBuffer {
 public:
  SymmetricBuffer() = default;

  // Collective. If one rank fails, every rank throws the same Error(Comm or OutOfMemory) naming the
  // buffer and that rank: `symmetric buffer "moe": rank 2 could not allocate ...`; if the group is
  // not mappable, Error(Unsupported) with the reason.
  static SymmetricBuffer create(Communicator& comm, const std::string& name, int64_t bytes);

  std::byte* local() const;
  std::byte* peer(int rank) const;
  int64_t bytes() const;
  bool contains(const void* p, int64_t bytes) const;
  explicit operator bool() const { return impl_ != nullptr; }

  // Collective: returns when all ranks are here, so that nobody uses the buffer any more, then lets
  // go of it. Copies of this handle, and the destructor, let go without waiting: memory lives until
  // its last user among the ranks has let go, so what a late peer stores always has a place to
  // land.
  void close();

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace moiety::comm
