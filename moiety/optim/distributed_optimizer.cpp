#include "moiety/optim/distributed_optimizer.h"

#include <algorithm>

#include "moiety/base/copy.h"
#include "moiety/base/error.h"
#include "moiety/base/integer.h"
#include "moiety/comm/gpu_transport.h"
#include "moiety/comm/gpu_waits.h"
#include "moiety/optim/initialize.h"
#include "moiety/optim/state_pieces.h"

namespace moiety::optim {
namespace {

constexpr int64_t kShareUnit = 256;  // bytes to which memory of a domain is given out

void check_config(const OptimizerConfig& config, const gtp::Grid& grid) {
  const auto is_stored = [](DType t) { return t == DType::kFloat32 || t == DType::kBFloat16; };
  MOIETY_CHECK(is_stored(config.weights) && is_stored(config.moments),
               "optimizer: weights {} and moments {} must be float32 or bfloat16",
               name(config.weights), name(config.moments));
  MOIETY_CHECK(is_stored(config.main_grad) && is_stored(config.grad_wire),
               "optimizer: main_grad {} and the wire {} must be float32 or bfloat16",
               name(config.main_grad), name(config.grad_wire));
  MOIETY_CHECK(config.bucket_elements > 0, "optimizer: buckets of {} elements",
               config.bucket_elements);
  const int gathered = std::max(grid.gtp, grid.egtp);
  if (config.device.type == DeviceType::kCuda && gathered > 1) {
    fail(ErrorKind::kUnsupported, "optimizer: (e)gtp of {} ranks with state on {}", gathered,
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
  check_config(config, groups.grid());
  check_specs(specs_);
  if (on_gpu() && world_.size() > 1) {
    lane_.emplace(config_.device);
    stands_ = Tensor(DType::kUInt64, {2}, config_.device);
  }
  for (size_t p = 0; p < specs_.size(); ++p) parameters_[p].spec = specs_[p];
  const std::vector<BucketLayout> layouts =
      layout_buffers(specs_, groups.grid(), config.bucket_elements);
  share(&DomainMemory::gradients, "gradients", layouts, [&](const BucketLayout& layout) {
    return layout.frozen ? 0 : BucketGradients::bytes_needed(layout, config_.main_grad);
  });
  for (const BucketLayout& layout : layouts) {
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
  for (Bucket& b : buckets_) {
    if (b.frozen) continue;
    b.segment = gradients.size();
    gradients.push_back({b.gradients->sum(), b.runs});
  }
  gradients_ = GradStatisticsTable(gradients, config_.device);
  if (on_gpu()) checksums_ = Tensor(DType::kUInt64, {2 * std::ssize(buckets_)}, config_.device);
  place_weights();
  find_fault_words();
  begin_gradients();
  write_state({});
}

// A GPU whose waits for peers have failed goes on with undefined sums; its weights stay as they are.
void DistributedOptimizer::find_fault_words() {
  if (!lane_) return;
  std::vector<const uint64_t*> words = comm::fault_words(world_);
  if (words.empty()) return;
  fault_words_ = Tensor(DType::kUInt64, {std::ssize(words)}, config_.device);
  copy(fault_words_,
       {const_cast<const uint64_t**>(words.data()), DType::kUInt64, {std::ssize(words)}}, stream_);
  stream_.synchronize();
}

DistributedOptimizer::DomainMemory& DistributedOptimizer::memory_of(comm::Communicator& domain) {
  for (DomainMemory& memory : domain_memory_) {
    if (memory.domain == &domain) return memory;
  }
  domain_memory_.push_back({.domain = &domain, .gradients = {}, .weights = {}});
  return domain_memory_.back();
}

// Whether the domain's operations read memory of its ranks' GPUs.
bool DistributedOptimizer::shares(comm::Communicator& domain) const {
  return on_gpu() && domain.size() > 1 && comm::maps_gpu_memory(domain);
}

// Makes memory of what the buckets need, for each domain of several ranks on GPUs that share it.
// Collective.
void DistributedOptimizer::share(comm::SymmetricBuffer DomainMemory::*part, const char* what,
                                 std::span<const BucketLayout> layouts,
                                 const std::function<int64_t(const BucketLayout&)>& bytes_of) {
  if (!on_gpu()) return;
  for (DomainMemory& memory : domain_memory_) {
    memory.bytes = 0;
    (memory.*part).close();
  }
  for (const BucketLayout& layout : layouts) {
    comm::Communicator& domain = groups_.of(layout.domain);
    if (domain.size() > 1) domain.prepare(config_.device);
    if (shares(domain)) memory_of(domain).bytes += round_up(bytes_of(layout), kShareUnit);
  }
  for (DomainMemory& memory : domain_memory_) {
    if (memory.bytes == 0) continue;
    memory.*part =
        comm::SymmetricBuffer::create(*memory.domain, text("{} of {}", what, memory.domain->name()),
                                      memory.bytes, config_.device);
    memory.domain->attach(memory.*part);
    memory.bytes = 0;  // from now on those that are taken
  }
}

std::byte* DistributedOptimizer::take(comm::Communicator& domain,
                                      comm::SymmetricBuffer DomainMemory::*part, int64_t bytes) {
  if (!shares(domain)) return nullptr;
  DomainMemory& memory = memory_of(domain);
  std::byte* const at = (memory.*part).local() + memory.bytes;
  memory.bytes += round_up(bytes, kShareUnit);
  return at;
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
      config_.device,
      take(*b.domain, &DomainMemory::gradients,
           BucketGradients::bytes_needed(b.layout, config_.main_grad)));
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

// Gathers in the order in which a forward pass reads the weights.
void DistributedOptimizer::gather_weights(bool all, Stream stream) {
  cast_weights(all, stream);
  std::vector<std::vector<comm::Ticket>> tickets(buckets_.size());
  for (const size_t i : forward_) {
    Bucket& b = buckets_[i];
    if (b.frozen && !all) continue;
    if (all || !travels_on_lane(b)) b.weights->gather(*b.domain, tickets[i], stream);
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
