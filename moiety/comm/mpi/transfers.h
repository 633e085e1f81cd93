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
  // Cancels messages that are not complete.
  ~Transfers() { cancel(); }
  Transfers(const Transfers&) = delete;
  Transfers& operator=(const Transfers&) = delete;

  // Posts a message to or from a rank of the world. Sender and receiver name the same number of
  // bytes; the sender may name fewer if that is one piece. Long messages travel in pieces, empty
  // ones not at all. Throws Error(kComm) if MPI fails.
  void send(int peer, int tag, const void* data, int64_t bytes);
  void receive(int peer, int tag, void* data, int64_t bytes);

  // Carries the messages on; true once all are complete. Never true if MPI must not be called any
  // more.
  bool done();
  // The peers of the messages that are not complete.
  std::vector<int> peers() const;
  // Takes back every message that can be taken back. If one stays under way, MPI is not called any
  // more.
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
