// Memory that all processes of one host can load from and store to: one memfd per rank, whose
// descriptor is handed to every peer through a unix socket in the abstract namespace. Nothing is
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

// Returns `bytes` zeroed bytes of every rank, by rank. Collective. `nonces` name the ranks'
// sockets: each rank draws one for every exchange, and all ranks pass the same list. If one rank
// fails, all free what they have and throw the same text, which begins with `what`:
// Error(kOutOfMemory), or Error(kUnsupported) where memory cannot be handed over.
std::vector<Memory> exchange_memory(Bootstrap& bootstrap, const std::string& what, int64_t bytes,
                                    const std::vector<Nonce>& nonces);

}  // namespace moiety::comm
