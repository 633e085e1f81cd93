// One rank's failure is everyone's error: the second phase of every collective set-up.
#pragma once

#include <string>

#include "moiety/base/error.h"
#include "moiety/comm/bootstrap.h"

namespace moiety::comm {

// Collective. Returns if every rank passes an empty text; else throws Error(kind) with the text of
// the lowest rank that has one, on every rank.
void agree(Bootstrap& bootstrap, const std::string& error, ErrorKind kind = ErrorKind::kComm);

}  // namespace moiety::comm
