// The number of rows that a rank's experts take per layer (moe.capacity_factor, moe.overflow).
//
// The automatic capacity is 1.25 times the balanced load at first. A pass in which a rank needs
// more is void: all ranks grow to 1.1 times the rows that were needed, and the pass is made again.
// So nothing is ever dropped, and memory follows the need.
#pragma once

#include <cstdint>

#include "moiety/model/transformer.h"
#include "moiety/train/config.h"

namespace moiety::train {

class ExpertCapacity {
 public:
  // `tokens` are those of a rank's pass.
  ExpertCapacity(const TrainConfig& config, const model::Transformer& model, int64_t tokens);

  int64_t rows() const { return rows_; }
  // Whether a pass that lost pairs is void (automatic, or moe.overflow = error).
  bool refuses_drops() const { return automatic_ || error_; }
  // Grows after such a pass for `required` rows, the largest need of a rank; throws UsageError if
  // the capacity is the user's.
  void grow(int64_t required);

 private:
  bool automatic_, error_;
  int64_t rows_, most_;
};

}  // namespace moiety::train
