// What the ranks of a run compare before they begin: the whole configuration, and what those of its
// values mean that may differ by host.
#pragma once

#include <string>
#include <vector>

#include "apps/moiety/config/options.h"
#include "moiety/comm/bootstrap.h"
#include "moiety/train/plan.h"

namespace moiety::app {

// Something that is to be the same on all ranks.
struct RankFact {
  std::string name;
  std::string value;
  std::string source;
};

// The keys that have one value on all ranks (AmongRanks::kSame), and the version of the program.
std::vector<RankFact> facts_of(const Config& config);
// What keys of AmongRanks::kByHost mean: the kind of device, the contents of data files, the
// checkpoint that the first weights are from. run.dir is compared by the trainer, which writes a
// file there (check_shared_directory); run.threads changes no result.
std::vector<RankFact> meanings_of(const Config& config, const train::TrainingPlan& plan);

// Compares a digest of the facts and, if digests differ, the facts. Returns the same sentence on
// all ranks, `rank 1 has optim.lr = 0.002 (command line), rank 0 0.001`, or nothing if all ranks
// have the same. Collective.
std::string first_difference(comm::Bootstrap& ranks, const std::vector<RankFact>& facts);

}  // namespace moiety::app
