// What ranks decide together over a bootstrap.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "moiety/comm/bootstrap.h"

namespace moiety::checkpoint {

// What `body` threw, as a short text that files and messages carry; empty if it threw nothing.
std::string report_of(const std::function<void()>& body);
// Throws what a report that is not empty tells of, with `prefix` ("rank 2: ") before its words.
[[noreturn]] void throw_report(std::string_view report, const std::string& prefix = {});

// Runs `body`, which must not communicate, on every rank. If it throws on one, all throw the same:
// the error of the lowest rank, with its number.
void together(comm::Bootstrap& bootstrap, const std::function<void()>& body);

// 32 hex digits that nobody else draws.
std::string random_id();

// Every rank's bytes, by rank, of any length.
std::vector<std::string> gather(comm::Bootstrap& bootstrap, std::string_view bytes);

// Sums mod 2^64 of as many words on every rank.
std::vector<uint64_t> sum_over_ranks(comm::Bootstrap& bootstrap,
                                     const std::vector<uint64_t>& words);

}  // namespace moiety::checkpoint
