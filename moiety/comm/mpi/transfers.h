// Messages under way between this rank and its peers. The memory that they use must stay until they
// are complete or cancelled.
#pragma once

#include <cstdint>
#include <vector>

#include "moiety/comm/mpi/functions.h"

namespace moiety::comm::mpi {

class World;

class Transfers {
 public:
  explicit Transfers(World& world) : world_(&world) {}
  // Messages that are not complete are cancelled.
  ~Transfers() { cancel(); }
  Transfers(const Transfers&) = delete;
  Transfers& operator=(const Transfers&) = delete;

  // A message to or from a rank of the world; sender and receiver name the same number of bytes, or
  // the sender fewer where that is one piece. Long messages travel in pieces, empty ones not at
  // all. All throw_error(Comm) if MPI fails.
  void send(int peer, int tag, const void* data, int64_t bytes);
  void receive(int peer, int tag, void* data, int64_t bytes);

  // Carries them on; true once all are complete. Never, if MPI must not be called any more.
  bool done();
  // The peers of those that are not complete.
  std::vector<int> peers() const;
  // Takes back what can be taken back. If something stays under way, MPI is not called any more.
  void cancel() noexcept;

 private:
  struct Message {
    Request request;
    int peer;
    bool incoming;
  };
  template <class Post>
  void post(int peer, int64_t bytes, bool incoming, Post&& post_piece);

  World* world_;
  std::vector<Message> messages_;
};

}  // namespace moiety::comm::mpi
