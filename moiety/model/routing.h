// The routing statistics of all MoE layers in one micro-batch: the layers' counts, the sums over
// the data ranks where the losses' scope is all of them, and the values of the losses.
#pragma once

#include <vector>

#include "moiety/comm/communicator.h"
#include "moiety/model/config.h"
#include "moiety/model/pass.h"
#include "moiety/model/step_stats.h"

namespace moiety::model {

class Routing {
 public:
  Routing() = default;
  // What gives the scope, for all tokens of the pass: targets and mask are as in loss.h, and of
  // tokens with routed = 0 there is none (optional uint8).
  struct Counted {
    TensorView target_T, mask_T, routed_T;
  };
  // Tensors lie on the pass's arena.
  Routing(const Config& config, const Pass& pass, const Counted& counted);

  // The statistics of MoE layer `index`, which its forward writes and its backward reads.
  moe::RouterStats stats_of(int64_t index) const;
  TensorView info(int64_t index) const { return info_LW_.select(index); }
  TensorView loss_count(int64_t index) const;
  TensorView scope() const { return scope_; }

  // Adds the counts to `sums` after the last layer's forward, and starts the sums over the ranks
  // that share the sequences, or over `world` (not null if the scope is global).
  void count(const StepSums& sums, comm::Communicator* world, Stream stream);
  // Ends the sums and adds the losses to `sums`.
  void losses(const StepSums& sums, Stream stream);

 private:
  bool pooled() const { return router_.aux == moe::AuxLoss::kHf; }
  // Whether this rank reports targets and losses: one of the ranks that share the sequences does.
  bool reports() const { return !tp_ || tp_->rank() == 0; }
  bool by_sequence() const { return router_.aux == moe::AuxLoss::kSequence; }

  moe::RouterConfig router_;
  bool global_ = false;
  comm::Communicator* tp_ = nullptr;  // the ranks that share the sequences
  int64_t layers_ = 0;
  TensorView count_LSE_, sum_LSE_;              // RouterStats of all layers
  TensorView pooled_count_SE_, pooled_sum_SE_;  // for kind hf: their sums over the layers
  TensorView info_LW_;                          // int64 [L, 16]
  TensorView scope_, own_scope_;                // int64 [2]: valid targets, tokens
  TensorView loss_2_;                           // float64: aux, z
  std::vector<comm::Ticket> tickets_;
};

}  // namespace moiety::model
