#include "moiety/train/rank_model.h"

#include <algorithm>

#include "moiety/checkpoint/loader.h"
#include "moiety/checkpoint/together.h"
#include "moiety/comm/gpu_waits.h"
#include "moiety/hf/load.h"
#include "moiety/moe/gpu_exchange.h"
#include "moiety/train/precision.h"

namespace moiety::train {

moe::EpLimits ep_limits(const TrainConfig& config, int64_t tokens) {
  moe::EpLimits limits = model::ep_limits(config.model, storage_dtype(config), tokens);
  limits.depth = static_cast<int>(config.ep.depth);
  return limits;
}

namespace {

comm::GpuLinkOptions link_options(const TrainConfig& settings) {
  return {.sum_blocks = settings.comm.sum_sms};
}

// On GPUs the world comes first: of what NCCL carries, parts are made from it. Its operations run
// alone until a step's addresses are settled.
comm::Communicator& prepared(comm::Communicator& world, Device device,
                             const comm::GpuLinkOptions& options) {
  if (device.type == DeviceType::kCuda && world.size() > 1) {
    world.run_alone(true);
    world.prepare(device, options);
  }
  return world;
}

}  // namespace

RankModel::RankModel(const TrainConfig& settings, const Grid& grid, int64_t tokens,
                     comm::Communicator& world, Device device)
    : world_(prepared(world, device, link_options(settings))),
      groups_(grid, world),
      device_(device) {
  const model::Config& config = settings.model;
  const DType storage = storage_dtype(settings);
  if (device.type == DeviceType::kCuda && world.size() > 1)
    groups_.prepare(device, link_options(settings));
  if (config.moe_layers() > 0) {
    moe::EpOptions options;
    options.deadline = world.bootstrap().deadline();
    options.zero_copy = settings.ep.zero_copy;
    options.comm_sms = static_cast<int>(settings.ep.comm_sms);
    options.device = device;
    comm::Communicator& ranks = groups_.of({gtp::Axis::kEp});
    group_ = moe::EpGroup::create(ranks, moe::ExpertMap(int(config.router.experts), ranks.size()),
                                  ep_limits(settings, tokens / grid.tp), options);
  }
  zero_copy_ = group_ && grid.ep > 1 && group_->zero_copy() == moe::ZeroCopy::kAuto;
  rows_are_quantized_ =
      precision_of_recipe(settings, settings.precision.recipe).dispatch.has_value();
  transformer_.emplace(
      config, storage,
      model::ModelContext{.experts = group_ ? &*group_ : nullptr,
                          .tp = grid.tp > 1 ? &groups_.of({gtp::Axis::kTp}) : nullptr,
                          .world = &world_,
                          .device = device});
}

void RankModel::share_rows(int64_t capacity, Arena& arena, Arena* other) {
  if (!zero_copy_) return;
  if (other) other_arena_ = other;
  comm::Communicator& comm = groups_.of({gtp::Axis::kEp});
  const model::Transformer& model = *transformer_;
  int64_t bytes = model::lent_bytes(model.config(), model.storage(), capacity, rows_are_quantized_);
  comm.all_reduce(TensorView(&bytes, DType::kInt64, {1}), comm::ReduceOp::kMax, Stream()).wait();
  const int64_t all = other_arena_ ? 2 * bytes : bytes;
  if (all <= shared_rows_.bytes()) return;
  arena.lend({});
  if (other_arena_) other_arena_->lend({});
  if (shared_rows_) {
    group_->detach(shared_rows_);
    shared_rows_.close();
  }
  shared_rows_ = comm::SymmetricBuffer::create(comm, "expert rows", all, device_);
  group_->attach(shared_rows_);
  arena.lend({shared_rows_.local(), size_t(bytes)});
  if (other_arena_) other_arena_->lend({shared_rows_.local() + bytes, size_t(bytes)});
}

std::vector<RankModel::GpuWait> RankModel::gpu_waits() const {
  std::vector<GpuWait> out;
  const auto add = [&](TraceLane axis, const void* word, Device gpu) {
    if (!word) return;
    out.push_back({axis, TensorView(const_cast<void*>(word), DType::kUInt8, {8}, gpu)});
  };
  if (group_) add(TraceLane::kEp, moe::waited_ns(*group_).raw(), group_->device());
  if (groups_.grid().tp > 1) {
    add(TraceLane::kTp, comm::waited_word(groups_.of({gtp::Axis::kTp})), device_);
  }
  return out;
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

void load_weights(const std::string& path, const optim::StateView& weights, RankModel& model) {
  optim::StateView view = model.router_biases();
  for (const optim::StatePiece& piece : weights) {
    if (piece.slot == "weight") view.push_back(piece);
  }
  comm::Bootstrap& ranks = model.world().bootstrap();
  if (hf::is_folder(path)) {
    return checkpoint::together(ranks, [&] {
      hf::load_weights(hf::Folder::open(path), model.transformer().config(), view);
    });
  }
  checkpoint::LoadOptions options;
  options.may_leave = checkpoint::is_no_weight;
  checkpoint::load(path, view, options, ranks);
}

}  // namespace moiety::train
