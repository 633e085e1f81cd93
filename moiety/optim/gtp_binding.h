// An optimizer's weights as an executor of GTP knows them (gtp/executor.h): the list of weights,
// the source of their shards, and the sink of their gradients.
//
//    DistributedOptimizer optimizer(specs, config, groups, shard_peers(dense),
//                                   shard_peers(experts));
//    GtpBinding binding(optimizer);
//    const gtp::BundleId fc1 = binding.add(parameter, layout, group);
//    gtp::Executor executor(binding.weights(), binding.bundles(), transports, options, ranks,
//                           binding, &binding);
//    optimizer.initialize(seed, stream);      // publishes: transports know their bundles by now
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "moiety/gtp/bundle.h"
#include "moiety/gtp/grad_sink.h"
#include "moiety/gtp/sharded_weight.h"
#include "moiety/gtp/transport.h"
#include "moiety/optim/distributed_optimizer.h"

namespace moiety::optim {

// The functions of `transport`, which must outlive the optimizer; they use the object that is in it
// when they are called. Empty if there is none now.
ShardPeers shard_peers(const std::unique_ptr<gtp::Transport>& transport);

class GtpBinding final : public gtp::GradSink, public gtp::ParamSource {
 public:
  // The optimizer outlives the binding, and does not change formats.
  explicit GtpBinding(DistributedOptimizer& optimizer) : optimizer_(optimizer) {}

  // Adds a bundle of the parameter's matrices: the parameter itself, or its experts, numbered
  // globally from `first_expert` on. `layout` is that of each matrix (shard_rows.h); `group` is the
  // index of the transport.
  gtp::BundleId add(int parameter, const gtp::Layout& layout, int group, int64_t first_expert = 0);

  // Lets rows move instead of the whole bundle, which is a table (gtp::Bundle::row_tokens).
  void move_rows(gtp::BundleId bundle, int64_t tokens) { bundles_.at(bundle).row_tokens = tokens; }

  const std::vector<gtp::ShardedWeight>& weights() const { return weights_; }
  const std::vector<gtp::Bundle>& bundles() const { return bundles_; }

  void ensure_ready(gtp::BundleId bundle, const Stream& stream) override;
  // A parameter is complete when all its matrices are; they are reported in one go.
  void on_grad_ready(gtp::WeightId weight, const Event& event) override;
  void on_grad_late(gtp::WeightId weight, const Stream& stream) override;
  // Gradients of all parameters begin anew, also of parameters that the executor does not know.
  void on_step_abandoned() override { optimizer_.begin_gradients(); }

 private:
  DistributedOptimizer& optimizer_;
  std::vector<gtp::ShardedWeight> weights_;
  std::vector<gtp::Bundle> bundles_;
  std::vector<int> parameter_of_bundle_;
  std::vector<gtp::BundleId> bundle_of_weight_;
};

}  // namespace moiety::optim
