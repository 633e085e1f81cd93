// Memory of equal size on every rank of a group that all ranks of the group can load from and store
// to: zeroed, its base aligned to 4 KiB. Peers see it through `peer(r)`. Ranks synchronize with
// words in it (release stores, acquire loads; see flags.h); there are no remote atomics.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "moiety/comm/communicator.h"

namespace moiety::comm {

class SymmetricBuffer {
 public:
  SymmetricBuffer() = default;

  // Collective. Throws the same Error(Comm or OutOfMemory) on every rank if one rank fails, naming
  // the buffer and that rank: `symmetric buffer "moe": rank 2 could not allocate ...`.
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
