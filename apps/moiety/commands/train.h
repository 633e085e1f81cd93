// `moiety train`: trains a model in a run directory, and goes on where its newest checkpoint ends.
#pragma once

#include <string>
#include <vector>

#include "apps/moiety/config/options.h"

namespace moiety::app {

struct TrainFlags {
  bool quiet = false;
  bool dry_run = false;  // everything but the steps
};

// Returns kExitDone, or kExitStartAgain after a signal or at run.max_hours. Errors are thrown: the
// first failing rank's.
int train(const Config& config, const TrainFlags& flags);

int train_command(const std::vector<std::string>& arguments);

}  // namespace moiety::app
