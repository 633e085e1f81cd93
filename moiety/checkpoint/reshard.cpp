#include "moiety/checkpoint/reshard.h"

#include <algorithm>
#include <tuple>

#include "moiety/checkpoint/checkpoint_error.h"

namespace moiety::checkpoint {
namespace {

// A box of the source of `moved`, moved to coordinates of the target, which is packed.
Box in_target(const MovedBox& moved, const Box& box) {
  Box out = moved.target;
  const int shift = moved.target.rank - moved.source.rank;  // of dimensions, 0 or 1
  for (int d = 0; d < box.rank; ++d) {
    out.start[d + shift] = box.start[d] + moved.target.start[d + shift] - moved.source.start[d];
    out.size[d + shift] = box.size[d];
  }
  return out;
}

// Appends the copies that fill the box of need `index`.
void plan_need(const PackedSlot& slot, const StatePiece& need, int index,
               std::vector<BoxCopy>& plan) {
  for (const PackedSlot::Part& part : slot.parts) {
    for (const MovedBox& moved : moved_boxes(part.move, need.box)) {
      for (const Piece& piece : part.source->pieces) {
        const auto common = intersect(piece.box, moved.source);
        if (!common || volume(*common) == 0) continue;
        plan.push_back({piece, index, in_target(moved, *common), in_target(moved, piece.box)});
      }
    }
  }
}

}  // namespace

PackedState::PackedState(const Manifest& manifest, int64_t interleave) {
  const ExpertLayout& experts = manifest.run.experts;
  std::map<std::string, std::vector<KeyShape>> keys;  // by slot: each is remapped by itself
  for (const auto& [name, tensor] : manifest.tensors) {
    for (const auto& [slot, entry] : tensor.slots) keys[slot].push_back({name, tensor.shape});
  }
  for (const auto& [slot, of_slot] : keys) {
    const KeyTarget target{experts.modules, ExpertForm::kPacked, experts.interleave, interleave};
    for (KeyMove& move : key_remap(of_slot, target, "checkpoint: " + slot)) {
      const SlotEntry& source = manifest.tensors.at(move.source.name).slots.at(slot);
      PackedSlot& logical = slots_[{move.target.name, slot}];
      if (logical.parts.empty()) {
        logical.shape = move.target.shape;
        logical.dtype = source.dtype;
      } else if (logical.dtype != source.dtype) {
        refuse("checkpoint: {}/{} is {}, those of other experts are {}", slot, move.source.name,
               name(source.dtype), name(logical.dtype));
      }
      logical.parts.push_back({std::move(move), &source});
    }
  }
}

const PackedSlot* PackedState::find(const std::string& tensor, const std::string& slot) const {
  const auto at = slots_.find({tensor, slot});
  return at == slots_.end() ? nullptr : &at->second;
}

std::vector<BoxCopy> plan_reshard(const PackedState& state, const StateView& needs) {
  std::vector<BoxCopy> plan;
  std::vector<Box> regions;
  for (size_t i = 0; i < needs.size(); ++i) {
    const StatePiece& need = needs[i];
    const PackedSlot* slot = state.find(need.tensor, need.slot);
    if (!slot) refuse("checkpoint: {}/{} is not in it", need.slot, need.tensor);
    if (slot->shape != need.shape || slot->dtype != need.dtype) {
      refuse("checkpoint: {}/{} has another shape or type than is needed", need.slot, need.tensor);
    }
    if (!contains(whole(need.shape), need.box)) {
      refuse("checkpoint: {}/{}: box {} is outside of shape {}", need.slot, need.tensor,
             describe(need.box), shape_text(need.shape));
    }
    const size_t before = plan.size();
    plan_need(*slot, need, static_cast<int>(i), plan);
    regions.clear();
    for (size_t k = before; k < plan.size(); ++k) regions.push_back(plan[k].region);
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
