// The state that a checkpoint holds beside tensors, so that a run continues bitwise as if it had
// never stopped.
#pragma once

#include <string>
#include <string_view>

#include "moiety/data/sampler.h"
#include "moiety/optim/step_decision.h"

namespace moiety::train {

struct TrainingState {
  data::SamplerState sampler;
  optim::StepState guard;  // skips in a row and the last losses; t is the checkpoint's own
};

std::string to_json(const TrainingState& state);
// The state in a JSON text. Throws CheckpointError if it is none.
TrainingState parse_training_state(std::string_view json);

}  // namespace moiety::train
