// The step from the part of a parameter that TP leaves to the part of it that GTP leaves
// (docs/spec/gtp.md#layout).
#pragma once

#include "moiety/gtp/layout.h"
#include "moiety/optim/parameter.h"

namespace moiety::optim {

// The shard that the layout's gtp rank holds. From each matrix of `slice`, which has at most the
// layout's slice rows, it takes s = layout.shard_rows() rows from row gtp_rank * s on. Rows past
// the slice's end are padding, and so are rows that the slice has no run for. `domain` stays as it
// is: the caller removes the axes that cut.
//
// Throws Error(kInvalidArgument) naming the parameter if its shape is neither [rows, columns] nor
// [members, rows, columns], or does not fit the layout.
ParamSpec shard_rows(const ParamSpec& slice, const gtp::Layout& layout);

}  // namespace moiety::optim
