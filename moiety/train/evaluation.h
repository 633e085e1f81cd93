// The loss of a model on validation samples.
#pragma once

#include "moiety/base/arena.h"
#include "moiety/data/batch_loader.h"
#include "moiety/train/expert_capacity.h"
#include "moiety/train/gathering.h"
#include "moiety/train/metrics.h"
#include "moiety/train/rank_model.h"

namespace moiety::train {

// Collective; the same result on every rank. Waits for the stream, which is of the model's device,
// after every batch. The arena is given back as it was. `gathering`: of a model whose weights are
// cut; null: they are whole.
EvaluationResult evaluate(RankModel& model, data::ValidationSet& samples, ExpertCapacity& capacity,
                          Arena& arena, const Stream& stream, WeightGathering* gathering = nullptr);

// The largest number of rows that a rank needed, if a pass with these statistics lost pairs on any
// rank; else 0. Collective.
int64_t lost_capacity(const model::StepStats& stats, comm::Communicator& world);

}  // namespace moiety::train
