// From the layout that a checkpoint was written under to the one that it is read under.
#pragma once

#include <vector>

#include "moiety/checkpoint/manifest.h"

namespace moiety::checkpoint {

// Elements of one piece that one needed box takes.
struct BoxCopy {
  Piece piece;
  int need = 0;  // index into the view
  Box region;    // in coordinates of the logical tensor
};

// What to copy so that every box of `needs` is filled, ordered by file and position, so that the
// copies of a piece are neighbours. Pure: nothing is read. Throws CheckpointError naming tensor,
// slot and box unless every needed element is covered exactly once.
std::vector<BoxCopy> plan_reshard(const Manifest& manifest, const StateView& needs);

}  // namespace moiety::checkpoint
