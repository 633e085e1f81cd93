#include "moiety/checkpoint/reshard.h"

#include <algorithm>
#include <tuple>

#include "moiety/checkpoint/checkpoint_error.h"

namespace moiety::checkpoint {

std::vector<BoxCopy> plan_reshard(const Manifest& manifest, const StateView& needs) {
  std::vector<BoxCopy> plan;
  std::vector<Box> regions;
  for (size_t i = 0; i < needs.size(); ++i) {
    const StatePiece& need = needs[i];
    const auto tensor = manifest.tensors.find(need.tensor);
    if (tensor == manifest.tensors.end() || !tensor->second.slots.contains(need.slot)) {
      refuse("checkpoint: {}/{} is not in it", need.slot, need.tensor);
    }
    const SlotEntry& entry = tensor->second.slots.at(need.slot);
    if (tensor->second.shape != need.shape || entry.dtype != need.dtype) {
      refuse("checkpoint: {}/{} has another shape or type than is needed", need.slot, need.tensor);
    }
    if (!contains(whole(need.shape), need.box)) {
      refuse("checkpoint: {}/{}: box {} is outside of shape {}", need.slot, need.tensor,
             describe(need.box), shape_text(need.shape));
    }
    regions.clear();
    for (const Piece& piece : entry.pieces) {
      if (const auto common = intersect(piece.box, need.box); common && volume(*common) > 0) {
        plan.push_back({piece, static_cast<int>(i), *common});
        regions.push_back(*common);
      }
    }
    if (const auto fault = cover_fault(need.box, regions)) {
      refuse("checkpoint: {}/{}: {}", need.slot, need.tensor, *fault);
    }
  }
  std::sort(plan.begin(), plan.end(), [](const BoxCopy& a, const BoxCopy& b) {
    return std::tie(a.piece.file, a.piece.begin, a.need) <
           std::tie(b.piece.file, b.piece.begin, b.need);
  });
  return plan;
}

}  // namespace moiety::checkpoint
