// Memory that all processes of one host can load from and store to: one memfd per rank, or memory of
// its GPU (mapped/gpu_memory.h), whose descriptor is handed to every peer through a unix socket in the
// abstract namespace. Nothing is left behind: the sockets have no file, descriptors are closed once
// mapped, and memory lives until the last process that maps it lets go of it or ends.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "moiety/comm/bootstrap.h"
#include "moiety/comm/process.h"

namespace moiety::comm {

// The start of a rank's memory; the last owner frees or unmaps it.
using Memory = std::shared_ptr<std::byte>;

// A file descriptor, closed at its end.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();
  int get() const { return fd_; }

 private:
  int fd_;
};

// Hands `mine`, which leads to this rank's memory, to every peer and returns theirs, by rank; this
// rank's place is empty. Collective. `nonces` name the ranks' sockets: each rank draws one for every
// exchange, and all ranks pass the same list. If one rank fails, all throw the same
// Error(kUnsupported), which begins with `what`.
std::vector<Descriptor> exchange_descriptors(Bootstrap& bootstrap, const std::string& what,
                                             const Descriptor& mine,
                                             const std::vector<Nonce>& nonces);

// Returns `bytes` zeroed bytes of every rank, by rank. Collective. If one rank fails, all free what
// they have and throw the same text, which begins with `what`: Error(kOutOfMemory), or
// Error(kUnsupported) where memory cannot be handed over.
std::vector<Memory> exchange_memory(Bootstrap& bootstrap, const std::string& what, int64_t bytes,
                                    const std::vector<Nonce>& nonces);

}  // namespace moiety::comm
