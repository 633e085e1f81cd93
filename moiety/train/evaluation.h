// The loss of a model on validation samples.
#pragma once

#include <vector>

#include "moiety/base/arena.h"
#include "moiety/data/batch_loader.h"
#include "moiety/train/expert_capacity.h"
#include "moiety/train/gathering.h"
#include "moiety/train/rank_model.h"

namespace moiety::train {

struct EvaluationResult {
  double loss = 0;           // mean cross-entropy, nats per token
  double bits_per_byte = 0;  // bits per byte of text; NaN if the samples have none
  int64_t tokens = 0;
  std::vector<double> balance;  // by MoE layer: pairs of the busiest expert / mean
};

// Evaluates the model. Collective; the same result on every rank. It waits for the stream, which is
// of the model's device, after every batch. The arena is given back as it was. `gathering` serves a
// model whose weights are cut; null if they are whole.
EvaluationResult evaluate(RankModel& model, data::ValidationSet& samples, ExpertCapacity& capacity,
                          Arena& arena, const Stream& stream, WeightGathering* gathering = nullptr);

// The largest number of rows that a rank needed, if a pass with these statistics lost pairs on any
// rank; else 0. Collective.
int64_t lost_capacity(const model::StepStats& stats, comm::Communicator& world);

}  // namespace moiety::train
