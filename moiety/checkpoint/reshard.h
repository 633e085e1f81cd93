// The plan of the copies from the layout under which a checkpoint was written to the layout under
// which it is read.
#pragma once

#include <vector>

#include "moiety/checkpoint/manifest.h"

namespace moiety::checkpoint {

// The elements of one piece that one needed box takes.
struct BoxCopy {
  Piece piece;
  int need = 0;  // index into the view
  Box region;    // in coordinates of the logical tensor
};

// The copies that fill every box of `needs`, ordered by file and position, so that the copies of a
// piece are neighbours. Pure: nothing is read. Throws CheckpointError naming tensor, slot and box
// unless every needed element is covered exactly once.
std::vector<BoxCopy> plan_reshard(const Manifest& manifest, const StateView& needs);

}  // namespace moiety::checkpoint
