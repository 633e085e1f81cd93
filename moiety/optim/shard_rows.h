// From what TP leaves of a parameter to what GTP leaves of that (docs/spec/gtp.md#layout).
#pragma once

#include "moiety/gtp/layout.h"
#include "moiety/optim/parameter.h"

namespace moiety::optim {

// The shard that the layout's gtp rank holds: of each matrix of `slice`, which has the layout's
// slice rows at most, s = layout.shard_rows() rows from row gtp_rank * s on. Rows past the slice's
// end are padding, and so are those that the slice has no run for. `domain` stays as it is: the
// caller takes the axes that cut out of it.
//
// Throws Error(InvalidArgument) naming the parameter if its shape is neither [rows, columns] nor
// [members, rows, columns], or does not fit the layout.
ParamSpec shard_rows(const ParamSpec& slice, const gtp::Layout& layout);

}  // namespace moiety::optim
