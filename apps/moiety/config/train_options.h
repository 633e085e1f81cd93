// From configuration keys to the values of a training.
#pragma once

#include <string>

#include "apps/moiety/config/launch.h"
#include "apps/moiety/config/options.h"
#include "moiety/train/config.h"
#include "moiety/train/memory_limit.h"

namespace moiety::app {

// Throws UsageError naming the first key whose words mean nothing, or that does not fit the model.
train::TrainConfig train_config(const Options& options);

// What of a training's keys the program alone knows: the run directory and the data. Throws
// UsageError.
void check_inputs(const Options& options);

// "a:b"; empty: none. Throws UsageError.
train::ProfileSteps parse_profile_steps(const std::string& text);

train::RankShare rank_share(const Launch& launch);

}  // namespace moiety::app
