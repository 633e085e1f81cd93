// The weights that gtp and egtp cut: transports that move them, and the executor that gathers them
// for the model and takes their gradients to the optimizer. Where nothing is cut all of it is
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
  // Collective. The groups outlive it, and it outlives the optimizer that has its peers. `memory`:
  // bytes of this rank, of which gathered weights may take a share. Without a wish the embedding
  // moves as what is fewer bytes: its rows, where peers map each other's memory, or the table.
  WeightGathering(const TrainConfig& config, const optim::GridGroups& groups, int64_t memory,
                  std::optional<gtp::EmbeddingPath> embedding = {});

  // What the optimizer asks; of the transports that there are when it asks.
  optim::ShardPeers peers(bool experts) const { return optim::shard_peers(transports_[experts]); }
  // Collective: lets go of executor and transports, before the optimizer places weights anew.
  void renew();
  // Collective, when it has placed them and before it publishes: the executor, which the parameters
  // name their bundles of. Null if nothing is cut.
  gtp::Executor* bind(optim::DistributedOptimizer& optimizer);

  // A step of the executor, if there is one; `micro_steps` passes, forward and backward if it
  // trains.
  std::optional<gtp::StepScope> begin_step(const char* kind, int64_t micro_steps);
  // Ends it: gradients are on their way to the optimizer.
  void flush();

  const gtp::Executor* executor() const { return executor_.get(); }

 private:
  bool moves_rows(const optim::Parameter& embedding) const;

  const optim::GridGroups& groups_;
  int64_t tokens_;  // of a data rank's pass
  std::optional<gtp::EmbeddingPath> embedding_;
  gtp::ExecutorOptions options_;
  double deadline_s_;
  std::array<std::unique_ptr<gtp::Transport>, 2> transports_;  // of dense weights, of experts
  std::optional<optim::GtpBinding> binding_;
  std::unique_ptr<gtp::Executor> executor_;
};

// Of what tp leaves of the parameters, the shards of this rank. `last`: the formats that they take
// later in the run, with which a shard has to agree as well.
std::vector<optim::ParamSpec> shard_specs(std::vector<optim::ParamSpec> slices,
                                          std::span<const optim::ParamSpec> last,
                                          const gtp::Grid& grid, int rank);

}  // namespace moiety::train
