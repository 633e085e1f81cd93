// What the model reports of the micro-batches of a step: sums, which a trainer adds over its ranks
// and divides once.
#pragma once

#include <cstdint>
#include <vector>

namespace moiety::model {

struct MoeLayerStats {
  std::vector<int64_t> expert_pairs;  // [E], own (token, expert) pairs before any drop
  int64_t required = 0;  // rows that the fullest rank of the group needed, largest micro-batch
  int64_t capacity = 0;  // rows of this rank, of the last micro-batch
  int64_t dropped = 0;   // pairs dropped in the group, summed
  bool overflow = false;
};

struct StepStats {
  double loss_sum = 0;  // cross-entropy, over valid targets
  int64_t targets = 0;  // valid ones
  int64_t tokens = 0;
  // Routing losses without coefficients, each micro-batch's weighted with its valid targets:
  // divided by the targets of all ranks they are what enters the objective.
  double aux_sum = 0;
  double z_sum = 0;
  std::vector<MoeLayerStats> moe;  // by MoE layer, ascending

  int64_t required() const {
    int64_t rows = 0;
    for (const MoeLayerStats& layer : moe) rows = layer.required > rows ? layer.required : rows;
    return rows;
  }
  bool overflow() const {
    for (const MoeLayerStats& layer : moe) {
      if (layer.overflow) return true;
    }
    return false;
  }
};

}  // namespace moiety::model
