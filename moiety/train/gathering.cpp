#include "moiety/train/gathering.h"

#include <algorithm>

#include "moiety/optim/shard_rows.h"
#include "moiety/train/precision.h"

namespace moiety::train {
namespace {

using gtp::Axis;

Axis cut_of(bool experts) { return experts ? Axis::kEgtp : Axis::kGtp; }

int64_t align_of(const std::optional<QuantSpec>& format) {
  return format ? gtp::Codec(*format).align() : gtp::Codec().align();
}

}  // namespace

WeightGathering::WeightGathering(const TrainConfig& config, const optim::GridGroups& groups,
                                 int64_t memory, std::optional<gtp::EmbeddingPath> embedding)
    : groups_(groups),
      tokens_(config.pass_tokens()),
      embedding_(embedding),
      deadline_s_(config.guard.comm_timeout_s) {
  options_.policy = gtp::Policy::for_memory(memory);
  options_.wire = gradient_wire(config);
  renew();
}

void WeightGathering::renew() {
  executor_.reset();
  binding_.reset();
  for (const bool experts : {false, true}) {
    std::unique_ptr<gtp::Transport>& transport = transports_[experts];
    transport.reset();
    comm::Communicator& peers = groups_.of({cut_of(experts)});
    if (peers.size() == 1) continue;
    gtp::TransportOptions options;
    options.name = experts ? "egtp" : "gtp";
    options.axis = experts ? TraceLane::kEgtp : TraceLane::kGtp;
    options.deadline = Seconds(deadline_s_);
    transport = gtp::make_transport(peers, options);
  }
}

gtp::Executor* WeightGathering::bind(optim::DistributedOptimizer& optimizer) {
  if (!transports_[0] && !transports_[1]) return nullptr;
  binding_.emplace(optimizer);
  const std::span<optim::Parameter> parameters = optimizer.parameters();
  for (size_t p = 0; p < parameters.size(); ++p) {
    const optim::ParamSpec& spec = parameters[p].spec;
    if (!spec.layout || spec.layout->gtp_size == 1) continue;
    parameters[p].bundle = binding_->add(static_cast<int>(p), *spec.layout, spec.expert);
    if (moves_rows(parameters[p])) binding_->move_rows(parameters[p].bundle, tokens_);
  }
  executor_ = std::make_unique<gtp::Executor>(
      binding_->weights(), binding_->bundles(),
      std::vector<gtp::Transport*>{transports_[0].get(), transports_[1].get()}, options_,
      &groups_.world().bootstrap(), *binding_, &*binding_);
  return executor_.get();
}

bool WeightGathering::moves_rows(const optim::Parameter& p) const {
  if (p.spec.kind != optim::ParameterClass::kEmbedding) return false;
  if (embedding_) return *embedding_ == gtp::EmbeddingPath::kRows;
  const gtp::EmbeddingTraffic traffic =
      gtp::embedding_traffic(*p.spec.layout, tokens_, p.weight.dtype(), options_.wire);
  return transports_[0]->kind() == gtp::TransportKind::kMapped &&
         traffic.smaller() == gtp::EmbeddingPath::kRows;
}

std::optional<gtp::StepScope> WeightGathering::begin_step(const char* kind, int64_t micro_steps) {
  if (!executor_) return std::nullopt;
  return executor_->begin_step({kind, micro_steps}, Stream());
}

void WeightGathering::flush() {
  if (executor_) executor_->flush(Stream());
}

std::vector<optim::ParamSpec> shard_specs(std::vector<optim::ParamSpec> slices,
                                          std::span<const optim::ParamSpec> last,
                                          const gtp::Grid& grid, int rank) {
  for (size_t p = 0; p < slices.size(); ++p) {
    optim::ParamSpec& spec = slices[p];
    const Axis cut = cut_of(spec.expert);
    if (!spec.layout || grid.degree(cut) == 1) continue;
    gtp::Layout layout = *spec.layout;
    layout.gtp_rank = grid.place(cut, rank);
    layout.gtp_size = grid.degree(cut);
    layout.align = std::max(align_of(spec.format), align_of(last[p].format));
    spec = optim::shard_rows(spec, layout);
    spec.layout = layout;
    spec.domain = spec.domain.without(cut);
  }
  return slices;
}

}  // namespace moiety::train
