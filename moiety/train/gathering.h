// The weights that gtp and egtp cut: the transports that move them, and the executor that gathers
// them for the model and takes their gradients to the optimizer. If nothing is cut all of it is
// empty.
#pragma once

#include <array>
#include <memory>
#include <optional>

#include "moiety/gtp/embedding.h"
#include "moiety/gtp/executor.h"
#include "moiety/optim/distributed_optimizer.h"
#include "moiety/optim/grid_groups.h"
#include "moiety/optim/gtp_binding.h"
#include "moiety/train/config.h"

namespace moiety::train {

class WeightGathering {
 public:
  // Makes the transports. Collective. The groups outlive the object, and it outlives the optimizer
  // that has its peers. `memory` is the number of bytes of this rank, of which gathered weights may
  // take a share. `embedding` is the way to move the embedding; by default the one with fewer
  // bytes: its rows, where peers map each other's memory, or the table.
  WeightGathering(const TrainConfig& config, const optim::GridGroups& groups, int64_t memory,
                  std::optional<gtp::EmbeddingPath> embedding = {});

  // The functions that the optimizer calls; they use the transports that exist at the call.
  optim::ShardPeers peers(bool experts) const { return optim::shard_peers(transports_[experts]); }
  // Lets go of executor and transports, before the optimizer places weights anew. Collective.
  void renew();
  // Makes the executor, whose bundles the parameters name, after the optimizer has placed the
  // weights and before it publishes them. Collective. Null if nothing is cut.
  gtp::Executor* bind(optim::DistributedOptimizer& optimizer);

  // Begins a step of the executor, if there is one, with `micro_steps` passes, forward and backward
  // if it trains.
  std::optional<gtp::StepScope> begin_step(const char* kind, int64_t micro_steps);
  // Ends the step: gradients are on their way to the optimizer.
  void flush();

  const gtp::Executor* executor() const { return executor_.get(); }

 private:
  bool moves_rows(const optim::Parameter& embedding) const;

  const optim::GridGroups& groups_;
  int64_t tokens_;  // tokens of a data rank's pass
  std::optional<gtp::EmbeddingPath> embedding_;
  gtp::ExecutorOptions options_;
  double deadline_s_;
  std::array<std::unique_ptr<gtp::Transport>, 2> transports_;  // for dense weights, for experts
  std::optional<optim::GtpBinding> binding_;
  std::unique_ptr<gtp::Executor> executor_;
};

// This rank's shards of the parts of the parameters that tp leaves. `last` are the formats that
// they take later in the run, which a shard has to fit as well.
std::vector<optim::ParamSpec> shard_specs(std::vector<optim::ParamSpec> slices,
                                          std::span<const optim::ParamSpec> last,
                                          const gtp::Grid& grid, int rank);

}  // namespace moiety::train
