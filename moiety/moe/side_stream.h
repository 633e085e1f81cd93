// The stream of exchanges that have something beside them (ep.overlap).
#pragma once

#include "moiety/base/stream.h"

namespace moiety::moe {

class EpGroup;

// On a GPU the same one for all callers; on a CPU a new one, which runs exchanges when their results
// are asked for.
Stream side_stream(EpGroup& group);

}  // namespace moiety::moe
