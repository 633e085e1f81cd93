// An endpoint for a rank that is a process, in a group of such ranks.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "moiety/base/buffer.h"
#include "moiety/comm/lane.h"
#include "moiety/comm/mpi/mpi_bootstrap.h"

namespace moiety::comm::mpi {

class MpiEndpoint final : public Endpoint {
 public:
  explicit MpiEndpoint(std::shared_ptr<const Group> group);
  // The group of all ranks of the world.
  static std::shared_ptr<MpiEndpoint> whole(const std::shared_ptr<World>& world);

  const std::string& name() const override { return group_->name; }
  Bootstrap& bootstrap() override { return bootstrap_; }
  bool may_map_memory() const override { return group_->world->options.map_memory; }
  GpuTransport gpu_transport() const override { return group_->world->options.gpu_transport; }
  std::unique_ptr<RankOperation> operation(uint64_t number, const std::string& label) override;
  uint64_t proposal() const override { return group_->world->next_group(); }
  std::shared_ptr<Endpoint> split(uint64_t number, int color, const std::string& name,
                                  const std::vector<int>& ranks,
                                  uint64_t largest_proposal) override;

 private:
  std::shared_ptr<const Group> group_;
  MpiBootstrap bootstrap_;
  std::shared_ptr<Buffer> staging_;  // used by the one operation that is under way
};

}  // namespace moiety::comm::mpi
