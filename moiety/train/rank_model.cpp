#include "moiety/train/rank_model.h"

#include <algorithm>

#include "moiety/checkpoint/loader.h"

namespace moiety::train {

RankModel::RankModel(const model::Config& config, DType storage, const Grid& grid, int64_t tokens,
                     double deadline_s, comm::Communicator& world, Device device)
    : world_(world), groups_(grid, world) {
  if (config.moe_layers() > 0) {
    moe::EpOptions options;
    options.deadline = Seconds(deadline_s);
    options.device = device;
    group_ = moe::EpGroup::create(groups_.of({gtp::Axis::kEp}),
                                  moe::ExpertMap(int(config.router.experts), grid.ep),
                                  model::ep_limits(config, storage, tokens / grid.tp), options);
  }
  transformer_.emplace(
      config, storage,
      model::ModelContext{.experts = group_ ? &*group_ : nullptr,
                          .tp = grid.tp > 1 ? &groups_.of({gtp::Axis::kTp}) : nullptr,
                          .world = &world_,
                          .device = device});
}

optim::StateView RankModel::router_biases() const {
  optim::StateView view;
  for (const model::Transformer::State& state : transformer_->states()) {
    const int64_t experts = state.view.numel();
    optim::StatePiece piece;
    piece.tensor = state.name;
    piece.slot = "weight";
    piece.dtype = state.view.dtype();
    piece.shape = {experts};
    piece.box.rank = 1;
    piece.box.size[0] = experts;
    piece.data = state.view.raw();
    piece.device = state.view.device();
    view.push_back(std::move(piece));
  }
  return view;
}

Tensor RankModel::pairs_of_all_ranks(const model::StepStats& stats) {
  const model::Config& config = transformer_->config();
  const int64_t experts = config.router.experts;
  Tensor pairs_LE(DType::kInt64, {config.moe_layers(), experts}, "expert pairs");
  for (size_t l = 0; l < stats.moe.size(); ++l) {
    std::copy_n(stats.moe[l].expert_pairs.data(), experts,
                pairs_LE.data<int64_t>() + int64_t(l) * experts);
  }
  world_.all_reduce(pairs_LE, comm::ReduceOp::kSum, Stream()).wait();
  return pairs_LE;
}

void RankModel::close() {
  if (group_) group_->close();
}

checkpoint::RunState load_weights(const std::string& path, const optim::StateView& weights,
                                  RankModel& model) {
  optim::StateView view = model.router_biases();
  for (const optim::StatePiece& piece : weights) {
    if (piece.slot == "weight") view.push_back(piece);
  }
  checkpoint::LoadOptions options;
  options.weights_only = true;
  return checkpoint::load(path, view, options, model.world().bootstrap());
}

}  // namespace moiety::train
