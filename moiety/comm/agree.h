// The second phase of every collective set-up, which makes one rank's failure everyone's error.
#pragma once

#include <functional>
#include <string>

#include "moiety/base/error.h"
#include "moiety/comm/bootstrap.h"

namespace moiety::comm {

// Returns if every rank passes an empty text; otherwise throws, on every rank, Error(kind) with the
// text of the lowest rank that has one. Collective.
void agree(Bootstrap& bootstrap, const std::string& error, ErrorKind kind = ErrorKind::kComm);
// Runs `step` and agrees on it: "WHAT: rank 1 could not DOING: ..." if it throws an Error.
void agree_on(Bootstrap& bootstrap, const std::string& what, const std::string& doing,
              ErrorKind kind, const std::function<void()>& step);

}  // namespace moiety::comm
