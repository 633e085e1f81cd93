// The memory of a rank's weights.
#pragma once

#include <span>

#include "moiety/base/dtype.h"
#include "moiety/model/precision.h"
#include "moiety/train/layout.h"

namespace moiety::train {

// Elements that a rank has, by the ranks that have them too: all of them; those of dp; those of edp;
// those of egtp and edp, for experts' tensors that egtp does not cut.
struct KeptElements {
  int64_t copied = 0, dense = 0, expert = 0, expert_copied = 0;
};

// The weights that a rank has, with the padding of its shards.
struct KeptWeights {
  // Counts them under the precisions of a run, one after the other; bytes are the most over all.
  KeptWeights(const model::Config& model, const Grid& grid, DType storage,
              std::span<const model::Precision> precisions);

  KeptElements trained, frozen;
  KeptElements frozen_codes;  // of the frozen ones, those that a precision of the run quantizes
  int64_t bytes = 0;
};

}  // namespace moiety::train
