// What ranks decide together over a bootstrap.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "moiety/comm/bootstrap.h"

namespace moiety::checkpoint {

// Runs `body`, which must not communicate, on every rank. If it throws on one, all throw the same:
// the error of the lowest rank, with its number.
void together(comm::Bootstrap& bootstrap, const std::function<void()>& body);

// Every rank's bytes, by rank, of any length.
std::vector<std::string> gather(comm::Bootstrap& bootstrap, std::string_view bytes);

// Sums mod 2^64 of as many words on every rank.
std::vector<uint64_t> sum_over_ranks(comm::Bootstrap& bootstrap,
                                     const std::vector<uint64_t>& words);

}  // namespace moiety::checkpoint
