// What a run that continues must share with the checkpoint.
#pragma once

#include <string>
#include <vector>

#include "apps/moiety/config/options.h"

namespace moiety::app {

// Compares by the table's resume classes. Throws CheckpointError with a line for every kMust key
// that differs: key, checkpoint's value, value now. Returns a sentence for every kMay key that
// differs.
std::vector<std::string> compare_for_resume(const Options& saved, const Options& now,
                                            const std::string& checkpoint);

}  // namespace moiety::app
