// The memory of a rank's weights.
#pragma once

#include <span>

#include "moiety/base/dtype.h"
#include "moiety/model/precision.h"
#include "moiety/train/layout.h"

namespace moiety::train {

// The weights that a rank has, with the padding of its shards.
struct KeptWeights {
  // Counts them under the precisions of a run, one after the other; bytes are the most over all.
  KeptWeights(const model::Config& model, const Grid& grid, DType storage,
              std::span<const model::Precision> precisions);

  // Elements. Those of experts that egtp does not cut are `expert_copied`.
  int64_t copied = 0, dense = 0, expert = 0, expert_copied = 0;
  int64_t bytes = 0;
};

}  // namespace moiety::train
