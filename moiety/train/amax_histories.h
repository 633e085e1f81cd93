// The histories of delayed scaling (model/delayed_scales.h) in checkpoints: for every such tensor one
// of slot "amax_history", float32 [histories, steps], oldest first. Every rank has all of them; rank
// 0 saves them. They are no M key: a run goes on with other settings from the newest values that
// fit, and with empty histories from a checkpoint without any.
#pragma once

#include <string>
#include <string_view>

#include "moiety/checkpoint/manifest.h"
#include "moiety/model/transformer.h"
#include "moiety/optim/state_view.h"

namespace moiety::train {

inline constexpr std::string_view kHistorySlot = "amax_history";

// The pieces to save; none without delayed scaling. Their memory changes with the next call, which
// waits for the stream.
optim::StateView saved_histories(model::Transformer& model, const Stream& stream);

// Steps of the histories in a checkpoint; 0: it has none.
int64_t history_steps(const checkpoint::Manifest& manifest);
// The pieces to load, before DelayedScales::adopt, of histories with so many steps.
optim::StateView history_room(model::Transformer& model, int64_t steps);

// Loads the histories alone, for a model whose weights are there. Collective. Without delayed
// scaling, or histories in the checkpoint, nothing happens.
void load_histories(const std::string& path, model::Transformer& model, comm::Communicator& world,
                    const Stream& stream);

}  // namespace moiety::train
