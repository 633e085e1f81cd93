// What a rank trains: the model, its weights wherever they lie, the optimizer that changes them,
// and the room that a pass takes.
#pragma once

#include "moiety/base/arena.h"
#include "moiety/base/stream.h"
#include "moiety/optim/distributed_optimizer.h"
#include "moiety/train/config.h"
#include "moiety/train/expert_capacity.h"
#include "moiety/train/gathering.h"
#include "moiety/train/plan.h"
#include "moiety/train/rank_model.h"

namespace moiety::train {

struct Learner {
  // Collective. The weights have no values yet; the plan's configuration outlives it.
  Learner(const TrainingPlan& plan, comm::Communicator& world);

  model::Transformer& transformer() { return model.transformer(); }
  // Collective: weights take the formats of another recipe, from the optimizer's masters.
  void set_recipe(Recipe wanted);
  // What a checkpoint loads: the optimizer's pieces, and the routers' biases. What it saves has the
  // biases on rank 0 alone.
  optim::StateView loaded_state();
  optim::StateView saved_state();

  const TrainConfig& config;
  Stream stream;
  RankModel model;
  WeightGathering gathering;
  optim::DistributedOptimizer optimizer;
  ExpertCapacity capacity;
  Arena arena;
  Recipe recipe;  // of the weights
};

}  // namespace moiety::train
