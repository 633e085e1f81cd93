#include "moiety/train/amax_histories.h"

#include "moiety/checkpoint/loader.h"

namespace moiety::train {
namespace {

optim::StateView pieces_of(const std::vector<model::DelayedScales::History>& histories) {
  optim::StateView view;
  for (const auto& [name, values] : histories) {
    optim::StatePiece piece;
    piece.tensor = name;
    piece.slot = kHistorySlot;
    piece.shape = {values.size(0), values.size(1)};
    piece.box.rank = 2;
    piece.box.size[0] = values.size(0);
    piece.box.size[1] = values.size(1);
    piece.data = values.raw();
    view.push_back(std::move(piece));
  }
  return view;
}

}  // namespace

optim::StateView saved_histories(model::Transformer& model, const Stream& stream) {
  model::DelayedScales* scales = model.delayed_scales();
  return scales ? pieces_of(scales->histories(stream)) : optim::StateView();
}

int64_t history_steps(const checkpoint::Manifest& manifest) {
  for (const auto& [name, entry] : manifest.tensors) {
    if (entry.slots.contains(std::string(kHistorySlot)) && !entry.shape.empty()) {
      return entry.shape.back();
    }
  }
  return 0;
}

optim::StateView history_room(model::Transformer& model, int64_t steps) {
  return pieces_of(model.delayed_scales()->make_room(steps));
}

void load_histories(const std::string& path, model::Transformer& model, comm::Communicator& world,
                    const Stream& stream) {
  const int64_t steps = history_steps(checkpoint::read_manifest(path));
  if (!model.delayed_scales() || steps == 0) return;
  checkpoint::LoadOptions options;
  options.may_leave = [](std::string_view slot) { return slot != kHistorySlot; };
  checkpoint::load(path, history_room(model, steps), options, world.bootstrap());
  model.delayed_scales()->adopt(stream);
}

}  // namespace moiety::train
