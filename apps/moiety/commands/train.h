// The command `moiety train`, which trains a model in a run directory and continues where its
// newest checkpoint ends.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "apps/moiety/config/options.h"

namespace moiety::app {

struct TrainFlags {
  bool quiet = false;
  bool dry_run = false;       // everything except the steps
  bool print_config = false;  // the configuration alone, once all ranks have agreed on it
  // The program's arguments, with which it starts its ranks as processes.
  std::vector<std::string> arguments;
};

// Trains with the configuration that `configure` loads. Its errors, as all others, are those of all
// ranks. Returns kExitDone, or kExitStartAgain after a signal or at run.max_hours. Throws the error
// of the first rank that fails.
int train(const std::function<Config()>& configure, const TrainFlags& flags);

int train_command(const std::vector<std::string>& arguments);

}  // namespace moiety::app
