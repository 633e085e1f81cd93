// The plan of the copies from the layout under which a checkpoint was written to the layout under
// which it is read.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "moiety/checkpoint/key_remap.h"
#include "moiety/checkpoint/manifest.h"

namespace moiety::checkpoint {

// A slot of a tensor as a reader names it, and what it is made of in the files: for most tensors
// themselves, for experts see key_remap.h.
struct PackedSlot {
  struct Part {
    KeyMove move;
    const SlotEntry* source = nullptr;
  };
  std::vector<int64_t> shape;
  DType dtype = DType::kFloat32;
  std::vector<Part> parts;
};

// A checkpoint's tensors with its experts packed, in the order of rows that the reader wants; plain
// order is that of all of Moiety's names and shapes. Refers to the manifest.
class PackedState {
 public:
  // Throws CheckpointError where key_remap does, and if a tensor's experts are of several types.
  PackedState(const Manifest& manifest, int64_t interleave = 0);

  using Key = std::pair<std::string, std::string>;  // tensor, slot
  const std::map<Key, PackedSlot>& slots() const { return slots_; }
  const PackedSlot* find(const std::string& tensor, const std::string& slot) const;

 private:
  std::map<Key, PackedSlot> slots_;
};

// The elements of one piece that one needed box takes.
struct BoxCopy {
  Piece piece;
  int need = 0;  // index into the view
  Box region;    // in coordinates of the logical tensor
  Box from;      // the piece's box, moved to where `region` is that part of it
};

// The copies that fill every box of `needs`, ordered by file and position, so that the copies of a
// piece are neighbours. Pure: nothing is read. Throws CheckpointError naming tensor, slot and box
// unless every needed element is covered exactly once.
std::vector<BoxCopy> plan_reshard(const PackedState& state, const StateView& needs);

}  // namespace moiety::checkpoint
