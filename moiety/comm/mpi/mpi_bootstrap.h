// The bootstrap of a group of processes: every rank sends every other one a length, then the bytes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "moiety/comm/bootstrap.h"
#include "moiety/comm/mpi/transfers.h"
#include "moiety/comm/mpi/world.h"

namespace moiety::comm::mpi {

// A group of ranks of the world, as one of its ranks knows it.
struct Group {
  std::shared_ptr<World> world;
  std::string name;
  uint64_t number = 0;           // tells its messages from those of other groups
  std::vector<int> world_ranks;  // world rank of each rank of the group
  int rank = 0;
  int size() const { return static_cast<int>(world_ranks.size()); }
  // The group's rank for a rank of the world.
  int rank_of(int world_rank) const;
};

// Kinds of messages in a group (World::tag).
inline constexpr int kLengthKind = 0;
inline constexpr int kBytesKind = 1;
inline constexpr int kCallKind = 2;
inline constexpr int kDataKind = 3;

class MpiBootstrap final : public Bootstrap {
 public:
  explicit MpiBootstrap(std::shared_ptr<const Group> group) : group_(std::move(group)) {}

  int rank() const override { return group_->rank; }
  int size() const override { return group_->size(); }
  std::vector<std::string> all_gather(std::string_view bytes) override;
  void abort(std::string_view text) noexcept override { group_->world->abort(text); }
  std::optional<std::string> aborted() const override { return group_->world->stopped(); }
  Seconds deadline() const override { return group_->world->options.deadline; }

 private:
  void finish(Transfers& transfers, const Deadline& limit) const;

  std::shared_ptr<const Group> group_;
};

}  // namespace moiety::comm::mpi
