#include "moiety/comm/mpi/mpi_bootstrap.h"

#include <algorithm>

#include "moiety/base/error.h"

namespace moiety::comm::mpi {

int Group::rank_of(int world_rank) const {
  const auto found = std::find(world_ranks.begin(), world_ranks.end(), world_rank);
  return static_cast<int>(found - world_ranks.begin());
}

std::vector<std::string> MpiBootstrap::all_gather(std::string_view bytes) {
  check_all_gather(bytes);
  World& world = *group_->world;
  const Deadline limit(deadline());
  const int lengths_tag = world.tag(group_->number, kLengthKind);
  const int bytes_tag = world.tag(group_->number, kBytesKind);
  std::vector<uint64_t> lengths(size());
  std::vector<std::string> out(size());
  lengths[rank()] = bytes.size();
  out[rank()] = bytes;

  Transfers transfers(world);
  const auto with_peers = [&](auto&& exchange) {
    for (int i = 1; i < size(); ++i) {
      const int r = (rank() + i) % size();
      exchange(r, group_->world_ranks[r]);
    }
    finish(transfers, limit);
  };
  with_peers([&](int r, int peer) {
    transfers.send(peer, lengths_tag, &lengths[rank()], sizeof(uint64_t));
    transfers.receive(peer, lengths_tag, &lengths[r], sizeof(uint64_t));
  });
  with_peers([&](int r, int peer) {
    out[r].resize(lengths[r]);
    transfers.send(peer, bytes_tag, out[rank()].data(), std::ssize(bytes));
    transfers.receive(peer, bytes_tag, out[r].data(), std::ssize(out[r]));
  });
  return out;
}

void MpiBootstrap::finish(Transfers& transfers, const Deadline& limit) const {
  World& world = *group_->world;
  Backoff backoff;
  while (!transfers.done()) {
    if (const auto reason = world.stopped()) {
      fail(ErrorKind::kComm, "bootstrap of \"{}\": rank {} stopped: {}", group_->name, rank(),
           *reason);
    }
    if (limit.expired()) {
      std::vector<int> missing;
      for (const int peer : transfers.peers()) missing.push_back(group_->rank_of(peer));
      std::sort(missing.begin(), missing.end());
      const std::string reason = text("bootstrap of \"{}\": rank {} waited {:.1f} s for {}",
                                      group_->name, rank(), deadline().count(), rank_list(missing));
      world.abort(reason);
      throw_error(ErrorKind::kComm, reason);
    }
    backoff.pause();
  }
}

}  // namespace moiety::comm::mpi
