// The translation of configuration keys into the values of a training.
#pragma once

#include <string>

#include "apps/moiety/config/device_choice.h"
#include "apps/moiety/config/launch.h"
#include "apps/moiety/config/options.h"
#include "moiety/data/tokenizer.h"
#include "moiety/train/config.h"
#include "moiety/train/memory_limit.h"

namespace moiety::app {

// Throws UsageError naming the first key that has an unknown word or does not fit the model, or the
// tokenizer. Without a tokenizer it is read as data.tokenizer says, which may throw as
// Tokenizer::load does.
train::TrainConfig train_config(const Options& options, const data::Tokenizer& tokenizer);
train::TrainConfig train_config(const Options& options);

// Checks the keys of a training that only the program knows: the run directory and the data. Throws
// UsageError.
void check_inputs(const Options& options);

// comm.transport.
comm::GpuTransport gpu_transport(const Options& options);

// data.pack.
data::Pack pack_of(const Options& options);

// The steps in "a:b"; none if it is empty. Throws UsageError.
train::ProfileSteps parse_profile_steps(const std::string& text);

// The choice is that of the launch's ranks.
train::RankShare rank_share(const Launch& launch, const DeviceChoice& choice);

}  // namespace moiety::app
