// The model on one rank: its groups of ranks, and the transformer. Training, evaluation and
// generation build on it.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "moiety/base/arena.h"
#include "moiety/base/trace.h"
#include "moiety/checkpoint/manifest.h"
#include "moiety/comm/communicator.h"
#include "moiety/model/transformer.h"
#include "moiety/moe/ep_group.h"
#include "moiety/optim/grid_groups.h"
#include "moiety/optim/state_view.h"
#include "moiety/train/config.h"
#include "moiety/train/layout.h"

namespace moiety::train {

// The limits of the expert-parallel group for `tokens` own tokens of a rank.
moe::EpLimits ep_limits(const TrainConfig& config, int64_t tokens);

class RankModel {
 public:
  // Makes the model of `config` in the layout `grid`. Collective over `world`, which outlives it. On
  // GPUs operations of several ranks run alone from then on (Communicator::run_alone).
  // `tokens` is the most of a data rank's pass.
  RankModel(const TrainConfig& config, const Grid& grid, int64_t tokens, comm::Communicator& world,
            Device device = {});

  model::Transformer& transformer() { return *transformer_; }
  comm::Communicator& world() { return world_; }
  const optim::GridGroups& groups() const { return groups_; }
  // Bytes of the expert-parallel group on this rank, and of rows that peers reach.
  int64_t expert_parallel_bytes() const {
    return group_ ? group_->bytes().total + shared_rows_.bytes() : 0;
  }
  // Nanoseconds that this rank's GPU has waited for peers so far, int64 [1] on it, as bytes, which it
  // adds to in the order of the model's stream.
  struct GpuWait {
    TraceLane axis;
    TensorView ns;
  };
  std::vector<GpuWait> gpu_waits() const;
  // Lends the arena memory for the rows of passes with this capacity that peers reach, in place of
  // what it had, if they are to (ep.zero_copy), and as much `other`, from its first
  // call on. Collective, between steps.
  void share_rows(int64_t capacity, Arena& arena, Arena* other = nullptr);

  // The routers' biases in the form that a checkpoint has. All ranks hold them; rank 0 saves them.
  optim::StateView router_biases() const;
  // The (token, expert) pairs of all ranks by MoE layer and expert, int64 [L, E]. Collective.
  Tensor pairs_of_all_ranks(const model::StepStats& stats);

  // Closes the group at a good end. Collective.
  void close();

 private:
  comm::Communicator& world_;
  optim::GridGroups groups_;
  Device device_;
  bool zero_copy_ = false, rows_are_quantized_ = false;
  comm::SymmetricBuffer shared_rows_;
  Arena* other_arena_ = nullptr;  // which has a share of them
  std::optional<moe::EpGroup> group_;
  std::optional<model::Transformer> transformer_;
};

// Weights alone, of a checkpoint or a Hugging Face folder, into pieces of slot "weight" and the
// routers' biases. Collective.
void load_weights(const std::string& path, const optim::StateView& weights, RankModel& model);

}  // namespace moiety::train
