// The translation of runs of a flat segment into boxes of logical tensors.
#pragma once

#include <span>
#include <string>

#include "moiety/base/tensor_view.h"
#include "moiety/optim/buffer_layout.h"
#include "moiety/optim/state_view.h"

namespace moiety::optim {

// The elements [begin, end), in row-major order, of a tensor of this shape, as few boxes: full rows
// are one box, a partial first and last row are boxes of their own. Ascending; each box's elements
// follow those of the box before.
std::vector<Box> boxes_of_range(std::span<const int64_t> shape, int64_t begin, int64_t end);

// Appends a piece for every box that the runs hold of slot `slot`; `data` is the segment. For a
// tensor whose columns are cut, a full row is one of the rank's columns.
void append_pieces(std::span<const ParamSpec> specs, std::span<const ElementRun> runs,
                   const std::string& slot, const TensorView& data, StateView& view);

}  // namespace moiety::optim
