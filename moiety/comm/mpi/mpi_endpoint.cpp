#include "moiety/comm/mpi/mpi_endpoint.h"

#include <algorithm>
#include <numeric>

#include "moiety/comm/mpi/mpi_operation.h"

namespace moiety::comm::mpi {

MpiEndpoint::MpiEndpoint(std::shared_ptr<const Group> group)
    : group_(group), bootstrap_(std::move(group)), staging_(std::make_shared<Buffer>()) {}

std::shared_ptr<MpiEndpoint> MpiEndpoint::whole(const std::shared_ptr<World>& world) {
  const auto group = std::make_shared<Group>();
  group->world = world;
  group->name = "world";
  group->number = world->next_group();
  group->rank = world->rank;
  group->world_ranks.resize(world->size);
  std::iota(group->world_ranks.begin(), group->world_ranks.end(), 0);
  world->take_group(group->number);
  return std::make_shared<MpiEndpoint>(group);
}

std::unique_ptr<RankOperation> MpiEndpoint::operation(uint64_t /*number*/,
                                                      const std::string& label) {
  return std::make_unique<MpiOperation>(group_, staging_, label);
}

std::shared_ptr<Endpoint> MpiEndpoint::split(uint64_t /*number*/, int color,
                                             const std::string& name, const std::vector<int>& ranks,
                                             uint64_t largest_proposal) {
  // All sub-groups of a split share a number, since no two of them share a rank.
  group_->world->take_group(largest_proposal);
  if (color < 0) return nullptr;
  const auto out = std::make_shared<Group>();
  out->world = group_->world;
  out->name = name;
  out->number = largest_proposal;
  for (const int r : ranks) out->world_ranks.push_back(group_->world_ranks[r]);
  out->rank = static_cast<int>(std::find(ranks.begin(), ranks.end(), group_->rank) - ranks.begin());
  return std::make_shared<MpiEndpoint>(out);
}

}  // namespace moiety::comm::mpi
