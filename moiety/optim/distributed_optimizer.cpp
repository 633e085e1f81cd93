#include "moiety/optim/distributed_optimizer.h"

#include <algorithm>

#include "moiety/base/copy.h"
#include "moiety/base/error.h"
#include "moiety/optim/initialize.h"
#include "moiety/optim/state_pieces.h"

namespace moiety::optim {
namespace {

void check_config(const OptimizerConfig& config, int ranks) {
  const auto is_stored = [](DType t) { return t == DType::kFloat32 || t == DType::kBFloat16; };
  MOIETY_CHECK(is_stored(config.weights) && is_stored(config.moments),
               "optimizer: weights {} and moments {} must be float32 or bfloat16",
               name(config.weights), name(config.moments));
  MOIETY_CHECK(is_stored(config.main_grad) && is_stored(config.grad_wire),
               "optimizer: main_grad {} and the wire {} must be float32 or bfloat16",
               name(config.main_grad), name(config.grad_wire));
  MOIETY_CHECK(config.bucket_elements > 0, "optimizer: buckets of {} elements",
               config.bucket_elements);
  if (config.device.type == DeviceType::kCuda && ranks > 1) {
    fail(ErrorKind::kUnsupported,
         "optimizer: {} ranks with state on {}, only one can have it there", ranks,
         name(config.device));
  }
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
      parameters_(specs_.size()),
      step_(config.device, world_.size()),
      stream_(Stream::on(config.device)) {
  check_config(config, world_.size());
  check_specs(specs_);
  for (size_t p = 0; p < specs_.size(); ++p) parameters_[p].spec = specs_[p];
  for (const BucketLayout& layout : layout_buffers(specs_, groups.grid(), config.bucket_elements)) {
    const size_t b = buckets_.size();
    for (const BucketLayout::Slot& slot : layout.slots) bucket_index_[slot.parameter] = b;
    buckets_.push_back(make_bucket(layout));
    forward_.push_back(b);
    if (layout.frozen) continue;
    auto same = std::find_if(domains_.begin(), domains_.end(), [&](const auto& domain) {
      return buckets_[domain[0]].domain == buckets_[b].domain;
    });
    if (same == domains_.end()) same = domains_.emplace(same);
    same->push_back(b);
  }
  // The parameters of a bucket are in reverse order.
  std::sort(forward_.begin(), forward_.end(), [&](size_t a, size_t b) {
    return buckets_[a].layout.slots.back().parameter < buckets_[b].layout.slots.back().parameter;
  });
  check_layouts();
  check_owners();
  std::vector<GradSegment> gradients;
  for (const Bucket& b : buckets_) {
    if (!b.frozen) gradients.push_back({b.gradients->sum(), b.runs});
  }
  gradients_ = GradStatisticsTable(gradients, config_.device);
  place_weights();
  begin_gradients();
  write_state({});
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
  b.runs = segment_runs(specs_, layout, b.domain->rank());
  if (layout.frozen) {
    b.frozen.emplace(layout.segment(), config_.weights, config_.device);
  } else {
    make_state(b);
  }
  return b;
}

void DistributedOptimizer::make_state(Bucket& b) {
  const int64_t n = b.layout.segment();
  b.gradients = std::make_unique<BucketGradients>(
      b.layout, config_.main_grad,
      config_.main_grad == DType::kBFloat16 ? DType::kBFloat16 : config_.grad_wire, *b.domain,
      config_.device);
  const int64_t moment_bytes = byte_size(config_.moments, n);
  const Device device = config_.device;
  b.state_memory =
      Buffer(byte_size(DType::kFloat32, n) + 2 * moment_bytes, device, "optimizer state");
  std::byte* at = b.state_memory.data();
  b.master = TensorView(at, DType::kFloat32, {n}, device);
  b.moments = TensorView(at + b.master.bytes(), config_.moments, {2, n}, device);
  for (const BucketLayout::Slot& slot : b.layout.slots) {
    Parameter& p = parameters_[slot.parameter];
    p.grad = slot_view(b.gradients->main_grad(), slot, p.spec);
  }
}

// Takes shared memory for shards where needed. Collective over the peers that share weights.
void DistributedOptimizer::place_weights() {
  const auto bytes_of = [&](const Bucket& b) {
    return BucketWeights::bytes_needed(specs_, b.layout, config_.weights);
  };
  std::array<int64_t, 2> bytes{};
  casts_.clear();
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
                                                config_.device, b.shared ? at : nullptr);
    if (!b.frozen) b.weights->set_master(b.master);
    b.weights->bind(parameters_);
    if (b.shared && at) at += bytes_of(b);
  }
  std::vector<AdamWArgs> segments;
  for (const size_t i : forward_) {
    const Bucket& b = buckets_[i];
    if (b.frozen) continue;
    segments.push_back({.grad = b.gradients->sum(),
                        .master = b.master,
                        .exp_avg = b.moments.select(0),
                        .exp_avg_sq = b.moments.select(1),
                        .weight = b.weights->own_storage(),
                        .runs = b.runs});
  }
  update_ = AdamWTable(segments, config_.device);
  make_casts();
}

// One cast for all trained buckets of a domain, and one for all frozen ones.
void DistributedOptimizer::make_casts() {
  struct Group {
    const Bucket* first;
    std::vector<BucketWeights*> buckets;
  };
  std::vector<Group> groups;
  for (const size_t i : forward_) {
    const Bucket& b = buckets_[i];
    if (b.weights->cast_items().empty()) continue;
    const auto at = std::find_if(groups.begin(), groups.end(), [&](const Group& g) {
      return g.first->domain == b.domain && g.first->holders == b.holders &&
             g.first->layout.frozen == b.layout.frozen;
    });
    Group& group = at != groups.end() ? *at : groups.emplace_back(Group{&b, {}});
    group.buckets.push_back(b.weights.get());
  }
  for (Group& g : groups) {
    casts_.push_back({g.first->layout.frozen, WeightCast(std::move(g.buckets), *g.first->domain,
                                                         *g.first->holders, config_.device)});
    if (!casts_.back().frozen) casts_.back().weights.set_masters();
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
  const Bucket& b = buckets_[bucket_index_.at(parameter)];
  if (!on_gpu()) stream.wait(b.published);
}

void DistributedOptimizer::initialize(uint64_t seed, Stream stream) {
  stream_ = stream;
  for (Bucket& b : buckets_) {
    if (b.frozen) {
      optim::initialize(specs_, b.runs, seed, b.frozen->open(*b.weights), Stream());
      continue;
    }
    optim::initialize(specs_, b.runs, seed, b.master, stream);
    fill_bytes(b.moments, 0, stream);
  }
  write_state({});
  publish(stream);
}

void DistributedOptimizer::publish(Stream stream) {
  stream_ = stream;
  await_drained(stream);
  for (Bucket& b : buckets_) {
    const TensorView& own = b.weights->own_storage();
    if (b.frozen) {
      b.frozen->publish(*b.weights, stream);
    } else if (own.defined()) {
      round_weights(b.master, own, stream);
    }
  }
  gather_weights(true, stream);
  end_view();
}

void DistributedOptimizer::set_formats(std::span<const std::optional<QuantSpec>> formats,
                                       Stream stream) {
  MOIETY_CHECK(formats.size() == specs_.size(), "optimizer: {} formats of {} parameters",
               formats.size(), specs_.size());
  for (size_t p = 0; p < specs_.size(); ++p) specs_[p].format = formats[p];
  await_drained(stream);
  stream_ = stream;
  for (Bucket& b : buckets_) {
    if (b.frozen) b.frozen->open(*b.weights);
  }
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

void DistributedOptimizer::cast_weights(bool all, Stream stream) {
  for (Cast& cast : casts_) {
    if (cast.frozen && !all) continue;
    if (cast.frozen) cast.weights.set_masters();
    cast.weights.begin(stream);
  }
  for (Cast& cast : casts_) {
    if (!cast.frozen || all) cast.weights.finish(stream);
  }
}

// Gathers in the order in which a forward pass reads the weights.
void DistributedOptimizer::gather_weights(bool all, Stream stream) {
  cast_weights(all, stream);
  std::vector<std::vector<comm::Ticket>> tickets(buckets_.size());
  for (const size_t i : forward_) {
    Bucket& b = buckets_[i];
    if (b.frozen && !all) continue;
    b.weights->gather(*b.domain, tickets[i], stream);
  }
  for (const size_t i : forward_) {
    Bucket& b = buckets_[i];
    if (b.frozen && !all) continue;
    for (comm::Ticket& ticket : tickets[i]) ticket.wait();
    if (!on_gpu()) b.published.record(stream);
    if (b.shared && b.peers->publish) b.peers->publish(static_cast<int32_t>(i), stream);
  }
}

StateView DistributedOptimizer::state_view() {
  StateView view;
  for (Bucket& b : buckets_) {
    if (b.frozen) {
      append_pieces(specs_, b.runs, "weight", b.frozen->open(*b.weights), view);
      continue;
    }
    append_pieces(specs_, b.runs, "weight", b.master, view);
    append_pieces(specs_, b.runs, "exp_avg", b.moments.select(0), view);
    append_pieces(specs_, b.runs, "exp_avg_sq", b.moments.select(1), view);
  }
  return view;
}

void DistributedOptimizer::end_view() {
  for (Bucket& b : buckets_) {
    if (b.frozen) b.frozen->close(stream_);
  }
}

}  // namespace moiety::optim
