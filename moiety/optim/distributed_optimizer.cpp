#include "moiety/optim/distributed_optimizer.h"

#include <algorithm>
#include <cstring>

#include "moiety/base/error.h"
#include "moiety/base/trace.h"
#include "moiety/optim/grad_norm.h"
#include "moiety/optim/initialize.h"
#include "moiety/optim/state_pieces.h"
#include "moiety/optim/step_rule.h"

namespace moiety::optim {
namespace {

std::vector<double> input_words(const StepInput& x) {
  namespace word = input_word;
  std::vector<double> out(word::kCount);
  out[word::kLr] = x.lr;
  out[word::kWeightDecay] = x.weight_decay;
  out[word::kClip] = x.clip;
  out[word::kTokens] = static_cast<double>(x.tokens);
  out[word::kBad] = static_cast<double>(x.bad);
  out[word::kOverflow] = x.overflow;
  out[word::kRequired] = static_cast<double>(x.required);
  out[word::kFlags] = x.flags;
  out.insert(out.end(), x.losses.begin(), x.losses.end());
  return out;
}

TensorView words_view(std::vector<double>& x) {
  return {x.data(), DType::kFloat64, {static_cast<int64_t>(x.size())}};
}

template <class T>
TensorView bytes_view(T& x) {
  return {&x, DType::kUInt8, {sizeof(T)}};
}

void check_config(const OptimizerConfig& config) {
  const auto is_stored = [](DType t) { return t == DType::kFloat32 || t == DType::kBFloat16; };
  MOIETY_CHECK(is_stored(config.weights) && is_stored(config.moments),
               "optimizer: weights {} and moments {} must be float32 or bfloat16",
               name(config.weights), name(config.moments));
  MOIETY_CHECK(is_stored(config.main_grad) && is_stored(config.grad_wire),
               "optimizer: main_grad {} and the wire {} must be float32 or bfloat16",
               name(config.main_grad), name(config.grad_wire));
  MOIETY_CHECK(config.bucket_elements > 0, "optimizer: buckets of {} elements",
               config.bucket_elements);
}

}  // namespace

DistributedOptimizer::DistributedOptimizer(std::vector<ParamSpec> specs,
                                           const OptimizerConfig& config, const GridGroups& groups,
                                           ShardPeers dense, ShardPeers experts)
    : specs_(std::move(specs)),
      config_(config),
      groups_(groups),
      world_(groups.world()),
      peers_{std::move(dense), std::move(experts)},
      bucket_index_(specs_.size()),
      parameters_(specs_.size()) {
  check_config(config);
  check_specs(specs_);
  for (size_t p = 0; p < specs_.size(); ++p) parameters_[p].spec = specs_[p];
  for (const BucketLayout& layout : layout_buffers(specs_, groups.grid(), config.bucket_elements)) {
    const size_t b = buckets_.size();
    for (const BucketLayout::Slot& slot : layout.slots) bucket_index_[slot.parameter] = b;
    buckets_.push_back(make_bucket(layout));
    forward_.push_back(b);
    auto same = std::find_if(domains_.begin(), domains_.end(), [&](const auto& domain) {
      return buckets_[domain[0]].domain == buckets_[b].domain;
    });
    if (same == domains_.end()) same = domains_.emplace(same);
    same->push_back(b);
  }
  // Parameters of a bucket are in reverse order.
  std::sort(forward_.begin(), forward_.end(), [&](size_t a, size_t b) {
    return buckets_[a].layout.slots.back().parameter < buckets_[b].layout.slots.back().parameter;
  });
  check_layouts();
  check_owners();
  place_weights();
  begin_gradients();
}

DistributedOptimizer::Bucket DistributedOptimizer::make_bucket(const BucketLayout& layout) {
  using gtp::Axis;
  Bucket b;
  b.layout = layout;
  b.domain = &groups_.of(layout.domain);
  b.holders = &groups_.of(layout.expert ? gtp::Axes{Axis::kEgtp, Axis::kEdp}
                                        : gtp::Axes{Axis::kTp, Axis::kGtp, Axis::kDp});
  const Axis cut = layout.expert ? Axis::kEgtp : Axis::kGtp;
  b.shared = groups_.grid().degree(cut) > 1 && !layout.domain.has(cut);
  b.peers = &peers_[layout.expert];
  const int64_t n = layout.segment();
  b.runs = segment_runs(specs_, layout, b.domain->rank());
  b.gradients = std::make_unique<BucketGradients>(
      layout, config_.main_grad,
      config_.main_grad == DType::kBFloat16 ? DType::kBFloat16 : config_.grad_wire, *b.domain);
  const int64_t moment_bytes = byte_size(config_.moments, n);
  b.state_memory = Buffer(byte_size(DType::kFloat32, n) + 2 * moment_bytes, "optimizer state");
  std::byte* at = b.state_memory.data();
  b.master = TensorView(at, DType::kFloat32, {n});
  b.exp_avg = TensorView(at + b.master.bytes(), config_.moments, {n});
  b.exp_avg_sq = TensorView(at + b.master.bytes() + moment_bytes, config_.moments, {n});
  for (const BucketLayout::Slot& slot : layout.slots) {
    Parameter& p = parameters_[slot.parameter];
    p.grad = slot_view(b.gradients->main_grad(), slot, p.spec);
  }
  return b;
}

// Collective over the peers that share weights.
void DistributedOptimizer::place_weights() {
  const auto bytes_of = [&](const Bucket& b) {
    return BucketWeights::bytes_needed(specs_, b.layout, config_.weights);
  };
  std::array<int64_t, 2> bytes{};
  for (Bucket& b : buckets_) {
    b.weights.reset();
    if (b.shared) bytes[b.layout.expert] += bytes_of(b);
  }
  std::array<std::byte*, 2> next{};
  for (const bool expert : {false, true}) {
    shard_memory_[expert] = {};
    if (!peers_[expert].allocate || bytes[expert] == 0) continue;
    shard_memory_[expert] =
        peers_[expert].allocate(expert ? "expert shards" : "dense shards", bytes[expert]);
    next[expert] = static_cast<std::byte*>(shard_memory_[expert].memory.raw());
  }
  for (Bucket& b : buckets_) {
    std::byte*& at = next[b.layout.expert];
    b.weights = std::make_unique<BucketWeights>(specs_, b.layout, config_.weights, b.domain->rank(),
                                                b.master, b.shared ? at : nullptr);
    b.weights->bind(parameters_);
    if (b.shared && at) at += bytes_of(b);
  }
}

std::optional<SharedShard> DistributedOptimizer::shared_shard(int parameter) const {
  const size_t index = bucket_index_.at(parameter);
  const Bucket& b = buckets_[index];
  if (!b.shared) return std::nullopt;
  return SharedShard{static_cast<int32_t>(index),
                     static_cast<const std::byte*>(shard_memory_[b.layout.expert].memory.raw())};
}

void DistributedOptimizer::ensure_ready(int parameter, const Stream& stream) const {
  stream.wait(buckets_[bucket_index_.at(parameter)].published);
}

void DistributedOptimizer::initialize(uint64_t seed, Stream stream) {
  for (Bucket& b : buckets_) {
    optim::initialize(specs_, b.runs, seed, b.master, stream);
    stream.run([moments = b.exp_avg, bytes = 2 * b.exp_avg.bytes()] {
      if (bytes > 0) std::memset(moments.raw(), 0, bytes);  // both, one behind the other
    });
  }
  state_ = StepState();
  publish(stream);
}

void DistributedOptimizer::publish(Stream stream) {
  await_drained(stream);
  for (Bucket& b : buckets_) {
    const TensorView& own = b.weights->own_storage();
    if (own.defined()) round_weights(b.master, own, stream);
  }
  gather_weights(stream);
}

void DistributedOptimizer::set_formats(std::span<const std::optional<QuantSpec>> formats,
                                       Stream stream) {
  MOIETY_CHECK(formats.size() == specs_.size(), "optimizer: {} formats of {} parameters",
               formats.size(), specs_.size());
  for (size_t p = 0; p < specs_.size(); ++p) specs_[p].format = formats[p];
  await_drained(stream);
  place_weights();
}

void DistributedOptimizer::await_drained(Stream stream) const {
  for (const bool expert : {false, true}) {
    const bool shared = std::any_of(buckets_.begin(), buckets_.end(), [&](const Bucket& b) {
      return b.shared && b.layout.expert == expert;
    });
    if (shared && peers_[expert].await_drained) peers_[expert].await_drained(stream);
  }
}

// In the order that a forward pass reads them.
void DistributedOptimizer::gather_weights(Stream stream) {
  std::vector<std::vector<comm::Ticket>> tickets(buckets_.size());
  for (const size_t i : forward_) {
    Bucket& b = buckets_[i];
    b.weights->cast(*b.domain, *b.holders, stream);
    b.weights->gather(*b.domain, tickets[i], stream);
  }
  for (const size_t i : forward_) {
    Bucket& b = buckets_[i];
    for (comm::Ticket& ticket : tickets[i]) ticket.wait();
    b.published.record(stream);
    if (b.shared && b.peers->publish) b.peers->publish(static_cast<int32_t>(i), stream);
  }
}

void DistributedOptimizer::restore(StepState state) {
  state_ = state;
  state_.set_applied(state_.t, rule());
}

StepRuleConfig DistributedOptimizer::rule() const {
  return {.beta1 = config_.adam.beta1,
          .beta2 = config_.adam.beta2,
          .guard = config_.guard,
          .max_skips = config_.max_skips,
          .spike_sigma = config_.spike_sigma};
}

StepReport DistributedOptimizer::step(const StepInput& input, Stream stream) {
  MOIETY_CHECK(input.tokens >= 0, "optimizer: {} tokens", input.tokens);
  const TraceSpan span(TraceLane::kHost, "optimizer");
  finish_gradients(stream);
  if (config_.compare_copies > 0 && state_.t % config_.compare_copies == 0) compare_copies();
  const auto losses = static_cast<int64_t>(input.losses.size()), width = rank_word::kCount + losses;
  std::vector<double> in = input_words(input), mine(width), all(world_.size() * width),
                      report(report_word::kCount + losses);
  measure(words_view(mine), words_view(in), stream);
  world_.all_gather(words_view(mine), words_view(all), stream).wait();
  AdamWStep step;
  step_rule(rule(), words_view(in), words_view(all).reshape({world_.size(), width}),
            bytes_view(state_), bytes_view(step), words_view(report), stream);
  stream.synchronize();
  if (!step.skip) update(bytes_view(step), stream);
  begin_gradients();
  stream.synchronize();
  return read_report(report);
}

void DistributedOptimizer::measure(TensorView words, TensorView input, Stream stream) {
  std::vector<GradSegment> segments;
  for (const Bucket& b : buckets_) segments.push_back({b.gradients->sum(), b.runs});
  GradStatistics sum;
  grad_statistics({segments, stream.device()}, bytes_view(sum), stream);
  pack_words(bytes_view(sum), input, words, stream);
  stream.synchronize();
}

void DistributedOptimizer::update(TensorView step, Stream stream) {
  std::vector<AdamWArgs> segments;
  for (const size_t i : forward_) {
    const Bucket& b = buckets_[i];
    segments.push_back({.grad = b.gradients->sum(),
                        .master = b.master,
                        .exp_avg = b.exp_avg,
                        .exp_avg_sq = b.exp_avg_sq,
                        .weight = b.weights->own_storage(),
                        .runs = b.runs});
  }
  await_drained(stream);
  adamw(config_.adam, config_.seed, step, {segments, stream.device()}, stream);
  gather_weights(stream);
}

StepReport DistributedOptimizer::read_report(std::span<const double> x) const {
  namespace word = report_word;
  StepReport out{.norm = static_cast<float>(x[word::kNorm]),
                 .coef = x[word::kCoef],
                 .skip = x[word::kSkip] != 0,
                 .halt = x[word::kHalt] != 0,
                 .skips_in_row = static_cast<int>(x[word::kSkipsInRow]),
                 .bad = static_cast<int64_t>(x[word::kBad]),
                 .bad_parameter = {},
                 .bad_rank = static_cast<int>(x[word::kBadRank]),
                 .t = static_cast<int64_t>(x[word::kT]),
                 .lr = x[word::kLr],
                 .tokens = static_cast<int64_t>(x[word::kTokens]),
                 .losses = {x.begin() + word::kCount, x.end()},
                 .overflow = x[word::kOverflow] != 0,
                 .required = static_cast<int64_t>(x[word::kRequired]),
                 .flags = static_cast<uint32_t>(x[word::kFlags])};
  for (int c = 0; c < kParameterClasses; ++c) {
    out.class_norms[c] = static_cast<float>(x[word::kClassNorm + c]);
  }
  if (x[word::kBadParameter] >= 0) {
    out.bad_parameter = specs_[static_cast<size_t>(x[word::kBadParameter])].name;
  }
  return out;
}

StateView DistributedOptimizer::state_view() {
  StateView view;
  for (const Bucket& b : buckets_) {
    append_pieces(specs_, b.runs, "weight", b.master, view);
    append_pieces(specs_, b.runs, "exp_avg", b.exp_avg, view);
    append_pieces(specs_, b.runs, "exp_avg_sq", b.exp_avg_sq, view);
  }
  return view;
}

}  // namespace moiety::optim
