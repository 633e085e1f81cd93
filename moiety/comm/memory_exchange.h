// Memory of processes of one host that all of them can load from and store to: one memfd per rank,
// its descriptor handed to every peer through a unix socket in the abstract namespace. Nothing is
// left behind: the sockets have no file, descriptors are closed once mapped, and memory lives until
// the last process that maps it lets go of it or ends.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "moiety/comm/bootstrap.h"
#include "moiety/comm/process.h"

namespace moiety::comm {

// The start of a rank's memory; the last owner frees or unmaps it.
using Memory = std::shared_ptr<std::byte>;

// Collective: `bytes` zeroed bytes of every rank, by rank. `nonces` name the ranks' sockets: drawn
// for every exchange by each rank, and the same everywhere. If one rank fails, all free what they
// have and throw the same text, which begins with `what`: Error(OutOfMemory), or Error(Unsupported)
// where memory cannot be handed over.
std::vector<Memory> exchange_memory(Bootstrap& bootstrap, const std::string& what, int64_t bytes,
                                    const std::vector<Nonce>& nonces);

}  // namespace moiety::comm
