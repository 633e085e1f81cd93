// The beginning of a training with the weights of a Hugging Face folder, without a checkpoint
// between them.
#pragma once

#include <string>

#include "moiety/hf/weight_source.h"
#include "moiety/optim/state_view.h"

namespace moiety::hf {

// Throws CheckpointError listing the keys of `config` that make it another model than the folder's,
// with both values, or naming a window that is shorter than `seq_len`.
void check_model(const Folder& folder, const model::Config& config, int64_t seq_len);

// Fills the boxes of `view`, float32 pieces of slot "weight" on any device, from the folder's
// weights of a model of `config`. Memory on a GPU is filled when this returns. Throws
// CheckpointError for a folder that does not fit or holds values that are not finite, IoError for
// the disk.
void load_weights(const Folder& folder, const model::Config& config, const optim::StateView& view);

}  // namespace moiety::hf
