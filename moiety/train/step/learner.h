// The trained part of a rank: the model, its weights wherever they lie, the optimizer that changes
// them, and the room that a pass takes.
#pragma once

#include <optional>
#include <vector>

#include "moiety/base/arena.h"
#include "moiety/base/stream.h"
#include "moiety/hf/folder.h"
#include "moiety/optim/distributed_optimizer.h"
#include "moiety/train/config.h"
#include "moiety/train/expert_capacity.h"
#include "moiety/train/gathering.h"
#include "moiety/train/plan.h"
#include "moiety/train/rank_model.h"

namespace moiety::train {

struct Learner {
  // Allocates everything. Collective. The weights have no values yet; the plan's configuration
  // outlives the object.
  Learner(const TrainingPlan& plan, comm::Communicator& world);

  model::Transformer& transformer() { return model.transformer(); }
  // Gives the weights the formats of another recipe, from the optimizer's masters. Collective.
  void set_recipe(Recipe wanted);
  // Lends the arenas rows that peers reach, as the capacity is now. Collective.
  void share_rows();
  // Settles the arenas (base/arena.h); returns whether addresses have changed.
  bool settle();
  // The state that a checkpoint loads: the optimizer's pieces, the routers' biases, and on rank 0
  // the side files. The state that it saves has the biases, and the histories of delayed scaling
  // (amax_histories.h), only on rank 0.
  optim::StateView loaded_state();
  optim::StateView saved_state();

  const TrainConfig& config;
  Stream stream;
  RankModel model;
  WeightGathering gathering;
  optim::DistributedOptimizer optimizer;
  ExpertCapacity capacity;
  Arena arena;
  std::optional<Arena> other_arena;  // of the other micro-batch, where two take turns
  Recipe recipe;                     // recipe of the weights
  // What goes with the model into every checkpoint (moiety/hf/side_tensors.h); of rank 0.
  std::vector<hf::SideFile> side_files;
};

}  // namespace moiety::train
