// A rank whose big weights GTP cuts: optimizer, executor, and the binding between them.
#pragma once

#include <array>
#include <memory>
#include <utility>
#include <vector>

#include "moiety/gtp/executor.h"
#include "moiety/optim/distributed_optimizer.h"
#include "moiety/optim/gtp_binding.h"

namespace moiety::optim {

struct GtpOptions {
  gtp::TransportKind kind = gtp::TransportKind::kMapped;
  Seconds deadline{60};
  OptimizerConfig optimizer{};
};

class GtpRank {
 public:
  // The executor knows the specs that have a layout; bundles are in their order.
  GtpRank(comm::Communicator& world, const gtp::Grid& grid, std::vector<ParamSpec> specs,
          const GtpOptions& options)
      : groups_(grid, world),
        transports_{transport(gtp::Axis::kGtp, options), transport(gtp::Axis::kEgtp, options)},
        optimizer_(std::move(specs), options.optimizer, groups_, peers(0), peers(1)),
        binding_(optimizer_) {
    for (size_t p = 0; p < optimizer_.parameters().size(); ++p) {
      Parameter& parameter = optimizer_.parameters()[p];
      const ParamSpec& spec = parameter.spec;
      if (!spec.layout) continue;
      const int64_t first =
          spec.expert ? grid.place(gtp::Axis::kEp, world.rank()) * spec.shape[0] : 0;
      parameter.bundle = binding_.add(static_cast<int>(p), *spec.layout, spec.expert, first);
    }
    executor_ = std::make_unique<gtp::Executor>(
        binding_.weights(), binding_.bundles(),
        std::vector<gtp::Transport*>{transports_[0].get(), transports_[1].get()},
        gtp::ExecutorOptions{}, &world.bootstrap(), binding_, &binding_);
  }

  const GridGroups& groups() const { return groups_; }
  DistributedOptimizer& optimizer() { return optimizer_; }
  gtp::Executor& executor() { return *executor_; }

 private:
  std::unique_ptr<gtp::Transport> transport(gtp::Axis axis, const GtpOptions& options) const {
    comm::Communicator& group = groups_.of({axis});
    if (group.size() == 1) return nullptr;
    return make_transport(group, {.name = group.name(), .deadline = options.deadline},
                          options.kind);
  }
  ShardPeers peers(size_t group) { return shard_peers(transports_[group]); }

  GridGroups groups_;
  std::array<std::unique_ptr<gtp::Transport>, 2> transports_;
  DistributedOptimizer optimizer_;
  GtpBinding binding_;
  std::unique_ptr<gtp::Executor> executor_;
};

}  // namespace moiety::optim
