// How many rows a rank's experts take per layer (moe.capacity_factor, moe.overflow).
// Automatic: 1.25 times the balanced load at first; a pass in which a rank needs more counts for
// nothing, all ranks grow to 1.1 times what was needed, and it is made again. So nothing is ever
// dropped and memory follows what is used.
#pragma once

#include <cstdint>

#include "moiety/model/transformer.h"
#include "moiety/train/config.h"

namespace moiety::train {

class ExpertCapacity {
 public:
  // `tokens` of a rank's pass.
  ExpertCapacity(const TrainConfig& config, const model::Transformer& model, int64_t tokens);

  int64_t rows() const { return rows_; }
  // A pass that lost pairs counts for nothing (automatic, or moe.overflow = error).
  bool refuses_drops() const { return automatic_ || error_; }
  // After such a pass: grows for `required` rows, the largest need of a rank, or, if the capacity
  // is the user's, throws UsageError.
  void grow(int64_t required);

 private:
  bool automatic_, error_;
  int64_t rows_, most_;
};

}  // namespace moiety::train
