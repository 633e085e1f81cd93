#include "moiety/optim/distributed_optimizer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>

#include "moiety/base/crc32c.h"
#include "moiety/base/error.h"
#include "moiety/base/parallel.h"
#include "moiety/base/trace.h"
#include "moiety/comm/agree.h"
#include "moiety/optim/grad_norm.h"
#include "moiety/optim/initialize.h"
#include "moiety/optim/state_pieces.h"

namespace moiety::optim {
namespace {

// A rank's statistics as they travel; the losses follow.
enum Word : size_t {
  kSumsq,
  kClassSumsq,
  kBad = kClassSumsq + kParameterClasses,
  kBadParameter,
  kTokens,
  kOverflow,
  kRequired,
  kFlags,
  kWords
};

void check_config(const OptimizerConfig& config) {
  const auto is_stored = [](DType t) { return t == DType::kFloat32 || t == DType::kBFloat16; };
  MOIETY_CHECK(is_stored(config.weights) && is_stored(config.moments),
               "optimizer: weights {} and moments {} must be float32 or bfloat16",
               name(config.weights), name(config.moments));
  MOIETY_CHECK(config.bucket_elements > 0, "optimizer: buckets of {} elements",
               config.bucket_elements);
}

// A sentence unless all ranks of the group pass the same word.
std::string difference(comm::Communicator& comm, uint32_t word, const char* what) {
  const auto all =
      comm.bootstrap().all_gather({reinterpret_cast<const char*>(&word), sizeof(word)});
  for (int r = 1; r < comm.size(); ++r) {
    if (all[r] != all[0]) {
      return text("optimizer: ranks 0 and {} of \"{}\" have different {}", r, comm.name(), what);
    }
  }
  return "";
}

}  // namespace

DistributedOptimizer::DistributedOptimizer(std::vector<ParamSpec> specs,
                                           const OptimizerConfig& config, comm::Communicator& world,
                                           comm::Communicator& experts)
    : specs_(std::move(specs)), config_(config), world_(world), experts_(experts) {
  check_config(config);
  check_specs(specs_);
  parameters_.resize(specs_.size());
  for (size_t p = 0; p < specs_.size(); ++p) parameters_[p].spec = specs_[p];
  for (const BucketLayout& layout :
       layout_buffers(specs_, world.size(), experts.size(), config.bucket_elements)) {
    buckets_.push_back(make_bucket(layout));
  }
  check_layouts();
  check_owners();
}

DistributedOptimizer::Bucket DistributedOptimizer::make_bucket(const BucketLayout& layout) {
  Bucket b;
  b.layout = layout;
  b.comm = layout.expert ? &experts_ : &world_;
  const int rank = b.comm->rank();
  const int64_t n = layout.segment();
  b.runs = segment_runs(specs_, layout, rank);
  b.grad_memory = Buffer(byte_size(DType::kFloat32, layout.length), "gradients");
  b.grads = b.grad_memory.view(DType::kFloat32, {layout.length});
  b.shard = b.grads;  // alone in its domain a rank's gradient is the sum
  if (layout.ranks > 1) {
    b.shard_memory = Buffer(byte_size(DType::kFloat32, n), "gradient shard");
    b.shard = b.shard_memory.view(DType::kFloat32, {n});
  }
  const int64_t moment_bytes = byte_size(config_.moments, n);
  b.state_memory = Buffer(byte_size(DType::kFloat32, n) + 2 * moment_bytes, "optimizer state");
  std::byte* at = b.state_memory.data();
  b.master = TensorView(at, DType::kFloat32, {n});
  b.exp_avg = TensorView(at + b.master.bytes(), config_.moments, {n});
  b.exp_avg_sq = TensorView(at + b.master.bytes() + moment_bytes, config_.moments, {n});
  for (const BucketLayout::Slot& slot : layout.slots) {
    Parameter& p = parameters_[slot.parameter];
    p.grad = slot_view(b.grads, slot, p.spec);
  }
  b.weights = std::make_unique<BucketWeights>(specs_, layout, config_.weights, rank, b.master);
  b.weights->bind(parameters_);
  return b;
}

void DistributedOptimizer::check_layouts() const {
  std::vector<BucketLayout> layouts;
  for (const Bucket& b : buckets_) layouts.push_back(b.layout);
  std::string tensors;
  for (const ParamSpec& spec : specs_) {
    tensors += text("{} {}\n", spec.name, static_cast<int>(spec.kind));
    for (const LogicalTensor& tensor : spec.tensors) {
      tensors += tensor.name;
      for (const int64_t n : tensor.shape) tensors += text(" {}", n);
      tensors += '\n';
    }
  }
  std::string error = difference(world_, crc32c(tensors), "tensors");
  const std::string dense =
      difference(world_, layout_hash(specs_, layouts, false), "dense parameters");
  const std::string expert =
      difference(experts_, layout_hash(specs_, layouts, true), "expert parameters");
  for (const std::string& next : {dense, expert}) {
    if (error.empty()) error = next;
  }
  comm::agree(world_.bootstrap(), error);
}

// Each element of every logical tensor has one owner: the owned counts of all ranks add up.
void DistributedOptimizer::check_owners() const {
  std::vector<size_t> first_tensor;  // of each parameter
  std::vector<const LogicalTensor*> tensors;
  for (const ParamSpec& spec : specs_) {
    first_tensor.push_back(tensors.size());
    for (const LogicalTensor& tensor : spec.tensors) tensors.push_back(&tensor);
  }
  std::vector<int64_t> owned(tensors.size());
  for (const Bucket& b : buckets_) {
    for (const ElementRun& run : b.runs) {
      owned[first_tensor[run.parameter] + run.tensor] += run.end - run.begin;
    }
  }
  const int64_t count = static_cast<int64_t>(owned.size());
  world_
      .all_reduce(TensorView(owned.data(), DType::kInt64, {count}), comm::ReduceOp::kSum, Stream())
      .wait();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::vector<int64_t>& shape = tensors[i]->shape;
    const int64_t expected =
        std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
    MOIETY_CHECK(owned[i] == expected, "optimizer: {} has {} elements, the ranks own {}",
                 tensors[i]->name, expected, owned[i]);
  }
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
  for (Bucket& b : buckets_) {
    b.weights.reset();
    b.weights = std::make_unique<BucketWeights>(specs_, b.layout, config_.weights, b.comm->rank(),
                                                b.master);
    b.weights->bind(parameters_);
  }
  publish(stream);
}

void DistributedOptimizer::gather_weights(Stream stream) {
  std::vector<comm::Ticket> tickets;
  for (Bucket& b : buckets_) {
    b.weights->cast(*b.comm, stream);
    b.weights->gather(*b.comm, tickets, stream);
  }
  for (comm::Ticket& ticket : tickets) ticket.wait();
}

void DistributedOptimizer::restore(StepState state) {
  state_ = std::move(state);
  state_.set_applied(state_.t, limits(0));
}

StepLimits DistributedOptimizer::limits(double clip) const {
  return {.beta1 = config_.adam.beta1,
          .beta2 = config_.adam.beta2,
          .clip = clip,
          .guard = config_.guard,
          .max_skips = config_.max_skips,
          .spike_sigma = config_.spike_sigma};
}

StepReport DistributedOptimizer::step(const StepInput& input, Stream stream) {
  MOIETY_CHECK(input.tokens >= 0, "optimizer: {} tokens", input.tokens);
  const TraceSpan span(TraceLane::kHost, "optimizer");
  zero_missing(stream);
  const StepStatistics statistics = reduce_and_measure(input, stream);
  const StepDecision decision = decide(limits(input.clip), statistics, state_);
  if (!decision.skip) update(input, decision, stream);
  for (Parameter& p : parameters_) p.overwrite = true;
  return report(input, decision, statistics);
}

void DistributedOptimizer::zero_missing(Stream stream) {
  for (Parameter& p : parameters_) {
    if (!p.overwrite) continue;
    stream.run([grad = p.grad] {
      auto* bytes = static_cast<std::byte*>(grad.raw());
      parallel_for(grad.bytes(), 1 << 20,
                   [&](int64_t begin, int64_t end) { std::memset(bytes + begin, 0, end - begin); });
    });
  }
}

StepStatistics DistributedOptimizer::reduce_and_measure(const StepInput& input, Stream stream) {
  std::vector<comm::Ticket> tickets(buckets_.size());
  for (size_t i = 0; i < buckets_.size(); ++i) {
    const Bucket& b = buckets_[i];
    if (b.layout.ranks == 1) continue;
    tickets[i] = b.comm->reduce_scatter(b.grads, b.shard, comm::ReduceOp::kSum, stream);
  }
  GradStatistics sum;
  for (size_t i = 0; i < buckets_.size(); ++i) {
    tickets[i].wait();
    GradStatistics own;
    grad_statistics(buckets_[i].shard, buckets_[i].runs, &own, stream);
    stream.synchronize();
    sum.add(own);
  }
  std::vector<double> mine(kWords);
  mine[kSumsq] = sum.sumsq;
  std::copy(sum.class_sumsq.begin(), sum.class_sumsq.end(), mine.begin() + kClassSumsq);
  mine[kBad] = static_cast<double>(sum.bad + input.bad);
  mine[kBadParameter] = sum.bad_parameter;
  mine[kTokens] = static_cast<double>(input.tokens);
  mine[kOverflow] = input.overflow;
  mine[kRequired] = static_cast<double>(input.required);
  mine[kFlags] = input.flags;
  mine.insert(mine.end(), input.losses.begin(), input.losses.end());
  std::vector<double> all(world_.size() * mine.size());
  const auto view = [](std::vector<double>& x) {
    return TensorView(x.data(), DType::kFloat64, {static_cast<int64_t>(x.size())});
  };
  world_.all_gather(view(mine), view(all), stream).wait();
  return combine(all, mine.size());
}

// In rank order, so that all ranks hold the same bits.
StepStatistics DistributedOptimizer::combine(const std::vector<double>& all, size_t width) const {
  StepStatistics out;
  out.losses.resize(width - kWords);
  for (int r = 0; r < world_.size(); ++r) {
    const double* x = all.data() + r * width;
    out.sumsq += x[kSumsq];
    for (int c = 0; c < kParameterClasses; ++c) out.class_sumsq[c] += x[kClassSumsq + c];
    out.bad += static_cast<int64_t>(x[kBad]);
    const int bad_parameter = static_cast<int>(x[kBadParameter]);
    if (bad_parameter >= 0 && (out.bad_parameter < 0 || bad_parameter < out.bad_parameter)) {
      out.bad_parameter = bad_parameter;
      out.bad_rank = r;
    }
    out.tokens += static_cast<int64_t>(x[kTokens]);
    out.overflow |= x[kOverflow] != 0;
    out.required = std::max(out.required, static_cast<int64_t>(x[kRequired]));
    out.flags |= static_cast<uint32_t>(x[kFlags]);
    for (size_t i = 0; i < out.losses.size(); ++i) out.losses[i] += x[kWords + i];
  }
  return out;
}

void DistributedOptimizer::update(const StepInput& input, const StepDecision& decision,
                                  Stream stream) {
  const AdamWStep step{.s = decision.s,
                       .k1 = decision.k1,
                       .k2 = decision.k2,
                       .lr = input.lr,
                       .weight_decay = input.weight_decay,
                       .t = state_.t,
                       .seed = config_.seed};
  for (Bucket& b : buckets_) {
    adamw(config_.adam, step,
          {.grad = b.shard,
           .master = b.master,
           .exp_avg = b.exp_avg,
           .exp_avg_sq = b.exp_avg_sq,
           .weight = b.weights->own_storage(),
           .runs = b.runs},
          stream);
  }
  gather_weights(stream);
}

StepReport DistributedOptimizer::report(const StepInput& input, const StepDecision& decision,
                                        const StepStatistics& statistics) const {
  StepReport out{.norm = static_cast<float>(decision.norm),
                 .coef = decision.coef,
                 .skip = decision.skip,
                 .halt = decision.halt,
                 .skips_in_row = state_.skips_in_row,
                 .bad = statistics.bad,
                 .bad_parameter = {},
                 .bad_rank = statistics.bad_rank,
                 .t = state_.t,
                 .lr = input.lr,
                 .tokens = statistics.tokens,
                 .losses = statistics.losses,
                 .overflow = statistics.overflow,
                 .required = statistics.required,
                 .flags = statistics.flags};
  for (int c = 0; c < kParameterClasses; ++c) {
    out.class_norms[c] = static_cast<float>(decision.scale * std::sqrt(statistics.class_sumsq[c]));
  }
  if (statistics.bad_parameter >= 0) out.bad_parameter = specs_[statistics.bad_parameter].name;
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
