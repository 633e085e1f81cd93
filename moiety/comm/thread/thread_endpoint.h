// An endpoint for a rank that is a thread, in a group of such ranks.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "moiety/comm/lane.h"
#include "moiety/comm/thread/group.h"

namespace moiety::comm::thread {

class ThreadEndpoint final : public Endpoint {
 public:
  ThreadEndpoint(std::shared_ptr<Group> group, int rank)
      : group_(std::move(group)), bootstrap_(group_, rank) {}

  const std::string& name() const override { return group_->name; }
  Bootstrap& bootstrap() override { return bootstrap_; }
  bool may_map_memory() const override { return group_->world->map_memory; }
  GpuTransport gpu_transport() const override { return group_->world->gpu_transport; }
  std::unique_ptr<RankOperation> operation(uint64_t number, const std::string& label) override;
  std::shared_ptr<Endpoint> split(uint64_t number, int color, const std::string& name,
                                  const std::vector<int>& ranks,
                                  uint64_t largest_proposal) override;

 private:
  std::shared_ptr<Group> group_;
  ThreadBootstrap bootstrap_;
};

}  // namespace moiety::comm::thread
