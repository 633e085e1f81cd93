// The words of `moiety import --upcycle`.
#pragma once

#include <string>

#include "moiety/hf/import.h"

namespace moiety::app {

// "experts=8,top_k=2[,noise=0.01][,layers=all|LIST]", where LIST is numbers and ranges, "0,2-5".
// Throws UsageError naming the word that does not fit.
hf::Upcycling parse_upcycling(const std::string& words);

}  // namespace moiety::app
