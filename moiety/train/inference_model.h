// A checkpoint's model on one rank and one device, to evaluate it or to generate with it.
#pragma once

#include <functional>

#include "moiety/optim/weight_store.h"
#include "moiety/train/config.h"
#include "moiety/train/rank_model.h"

namespace moiety::train {

class InferenceModel {
 public:
  // Loads the checkpoint at `path`, of a training with this configuration, onto the stream's
  // device. `tokens` is the most of a pass. `world` has one rank. Throws what checkpoint::load
  // throws.
  InferenceModel(const std::string& path, const TrainConfig& config, int64_t tokens,
                 comm::Communicator& world, const Stream& stream);

  RankModel& model() { return model_; }
  model::Transformer& transformer() { return model_.transformer(); }

 private:
  RankModel model_;
  optim::WeightStore weights_;
};

// Runs body(world) as the only rank, with so many threads for its loops; 0: all that the
// environment allows.
void run_alone(int64_t threads, const std::function<void(comm::Communicator& world)>& body);

}  // namespace moiety::train
