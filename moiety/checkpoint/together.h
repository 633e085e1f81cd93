// Decisions that ranks take together over a bootstrap.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "moiety/comm/bootstrap.h"

namespace moiety::checkpoint {

// The error that `body` threw, as a short text that files and messages carry; empty if it threw
// none.
std::string report_of(const std::function<void()>& body);
// Throws the error in a report that is not empty, with `prefix` ("rank 2: ") before its words.
[[noreturn]] void throw_report(std::string_view report, const std::string& prefix = {});

// Runs `body`, which must not communicate, on every rank. If it throws on one, all throw the same:
// the error of the lowest rank, with its number.
void together(comm::Bootstrap& bootstrap, const std::function<void()>& body);

// A random id of 32 hex digits.
std::string random_id();

// The bytes of every rank, by rank, of any length.
std::vector<std::string> gather(comm::Bootstrap& bootstrap, std::string_view bytes);

// The sums, mod 2^64, of as many words on every rank.
std::vector<uint64_t> sum_over_ranks(comm::Bootstrap& bootstrap,
                                     const std::vector<uint64_t>& words);

}  // namespace moiety::checkpoint
