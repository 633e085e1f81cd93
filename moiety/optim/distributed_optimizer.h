// The optimizer whose state is divided among the ranks (after ZeRO, Rajbhandari et al., SC 2020,
// and Megatron's distributed optimizer): it owns weights and gradients of the model in flat buckets
// (buffer_layout.h) and, of the own segment of each bucket, fp32 masters and moments.
//
// A step: gradients are summed over each parameter's domain, of which every rank gets its segment;
// statistics of all ranks are gathered and combined in rank order, so that all decide alike
// (step_rule.h); AdamW on the own segment; all-gather of the weights.
//
// Nothing is scaled before the update: backward gives gradients of a sum over tokens, and 1/tokens
// is applied once, with the clip factor. A skipped step changes nothing but `skips_in_row` and
// `halt`.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "moiety/base/buffer.h"
#include "moiety/base/stream.h"
#include "moiety/comm/communicator.h"
#include "moiety/gtp/slot_arena.h"
#include "moiety/optim/adamw.h"
#include "moiety/optim/bucket_gradients.h"
#include "moiety/optim/bucket_weights.h"
#include "moiety/optim/buffer_layout.h"
#include "moiety/optim/grad_norm.h"
#include "moiety/optim/grid_groups.h"
#include "moiety/optim/parameter.h"
#include "moiety/optim/state_view.h"
#include "moiety/optim/step_decision.h"

namespace moiety::optim {

struct OptimizerConfig {
  AdamW adam{};
  DType weights = DType::kBFloat16;  // storage of the weights: bfloat16 or float32
  DType moments = DType::kFloat32;   // or bfloat16, stochastically rounded
  uint64_t seed = 0;                 // of that rounding
  NanGuard guard = NanGuard::kStep;
  int max_skips = 3;
  double spike_sigma = 0;
  int64_t bucket_elements = kBucketElements;
  DType main_grad = DType::kFloat32;  // or bfloat16
  DType grad_wire = DType::kFloat32;  // what ranks send of it: also bfloat16, summed in fp32
  // Every so many steps ranks compare checksums of their copies of weights; 0: never.
  int64_t compare_copies = 100;
  // Where weights, gradients and state lie. On a GPU the world is one rank, and all streams that
  // the optimizer hears of are one: gradients are written and weights read in its order.
  Device device = {};
};

inline constexpr int64_t kMaxStepLosses = 32;  // there is memory for so many

// What a rank brings to a step. lr, weight_decay and clip are the same on all ranks, and so is the
// number of losses.
struct StepInput {
  double lr = 0;
  double weight_decay = 0;
  double clip = 0;     // of the norm; 0: none
  int64_t tokens = 0;  // loss tokens of this rank
  // Sums over this rank's tokens, at most kMaxStepLosses; the first is watched for spikes.
  std::vector<double> losses{};
  int64_t bad = 0;        // non-finite values that this rank saw elsewhere: count as its own
  bool overflow = false;  // this rank's capacity did not suffice: skip, halt, repeat
  int64_t required = 0;   // the capacity that it needed
  uint32_t flags = 0;     // anything that one rank must be able to tell all
};

// As `enqueue` takes it.
std::vector<double> input_words(const StepInput& input);

// The same on all ranks.
struct StepReport {
  float norm = 0;  // L2 norm of the mean gradient, before clipping
  std::array<float, kParameterClasses> class_norms{};
  double coef = 1;  // of clipping
  bool skip = false;
  bool halt = false;
  int skips_in_row = 0;
  int64_t bad = 0;            // non-finite gradient elements, and StepInput::bad
  std::string bad_parameter;  // the first with such a gradient, and the first rank that found it
  int bad_rank = -1;
  int64_t t = 0;  // applied steps
  double lr = 0;
  int64_t tokens = 0;
  std::vector<double> losses{};  // summed over ranks
  bool overflow = false;         // on some rank
  int64_t required = 0;          // the largest
  uint32_t flags = 0;            // or-ed
};

// What the optimizer asks of the transport by which (e)gtp peers gather shards (gtp/transport.h).
// Without functions there are no such peers.
struct ShardPeers {
  // Collective over the peers: zeroed memory that they can gather from.
  std::function<gtp::SlotArena::Block(const std::string& what, int64_t bytes)> allocate;
  // What is run on the stream afterwards may overwrite shards (E7).
  std::function<void(const Stream&)> await_drained;
  // The bucket's shards are written (E1).
  std::function<void(int32_t bucket, const Stream&)> publish;
};

// A parameter that (e)gtp cuts: where its peers find what they gather.
struct SharedShard {
  int32_t bucket = 0;  // of ShardPeers::publish
  // Of bytes that ShardPeers::allocate gave, the first of this rank's; the same places hold the
  // same arrays at all peers. Null if it gave none.
  const std::byte* memory = nullptr;
};

class DistributedOptimizer {
 public:
  // Collective. All ranks pass the same parameters in the same order, but for which parts they
  // hold. `groups`, and what the functions of `dense` and `experts` use, outlive the optimizer.
  // Weights and state are zero. Throws, on every rank, if the ranks disagree about the layout
  // (Comm) or if an element of a logical tensor has no owner or several (InvalidArgument).
  DistributedOptimizer(std::vector<ParamSpec> specs, const OptimizerConfig& config,
                       const GridGroups& groups, ShardPeers dense = {}, ShardPeers experts = {});
  DistributedOptimizer(const DistributedOptimizer&) = delete;
  DistributedOptimizer& operator=(const DistributedOptimizer&) = delete;

  // In the order of the specs; addresses do not change. Backward adds to `grad` (or overwrites it,
  // see Parameter::overwrite) any number of times before a step; a parameter without contribution
  // counts as gradient zero.
  std::span<Parameter> parameters() { return parameters_; }

  // Collective: initial masters, zero moments, t = 0, published weights.
  void initialize(uint64_t seed, Stream stream);

  // The gradient of a parameter is complete when `event` is. A bucket whose gradients all are is
  // summed beside the rest of backward, in an order that is the same on all ranks; others at the
  // step. A parameter that is never reported counts as complete then. If one rank of a domain
  // reports anything in a step, all do.
  void on_grad_ready(int parameter, const Event& event);
  // More is to be added to a gradient that was complete. Waits until nobody reads it; it is summed
  // again, with the same bits as if it had not been complete.
  void on_grad_late(int parameter);
  // What is run on the stream afterwards reads the parameter's published weights.
  void ensure_ready(int parameter, const Stream& stream) const;
  // Of a parameter that (e)gtp cuts; its arrays are those of `parameters()`.
  std::optional<SharedShard> shared_shard(int parameter) const;

  // Collective. Afterwards gradients begin anew.
  StepReport step(const StepInput& input, Stream stream);
  // The same in the order of the stream, without bringing anything to the host: `input` and
  // `report`, on the optimizer's device, are float64 vectors of the words of step_words.h, of equal
  // numbers of losses. On a GPU the host waits for nothing and allocates nothing there, so that a
  // step can be captured in a graph.
  void enqueue(TensorView input, TensorView report, Stream stream);
  // Of the words that `enqueue` wrote, copied to the host.
  StepReport read_report(TensorView on_host) const;
  // int32 [1], on the device: whether the last step changed nothing.
  TensorView skip() const;
  // Gradients begin anew without a step: what was contributed and reported since the last one
  // counts no more. Waits for sums that have begun; all ranks of a domain do it, after the same
  // reports.
  void begin_gradients();

  // Masters ("weight") and moments of this rank.
  StateView state_view();
  // The rest of the state: the same on all ranks. These three wait for the stream that the
  // optimizer worked on last.
  StepState step_state() const;
  // `t`, `skips_in_row`, `halt` and `losses` of a state that was saved; the powers follow from t.
  void restore(StepState state);
  void clear_halt();
  // Collective, after masters were loaded or formats changed: weights := masters rounded, on all
  // ranks.
  void publish(Stream stream);
  // Collective: from the next publish on weights are kept in these formats, by parameter. Weights
  // move; masters, moments and gradients stay. Parameters of one class change alike.
  void set_formats(std::span<const std::optional<QuantSpec>> formats, Stream stream);

 private:
  struct Bucket {
    BucketLayout layout;
    comm::Communicator* domain = nullptr;
    comm::Communicator* holders = nullptr;  // all that hold elements of its uncut weights
    std::vector<ElementRun> runs;           // of the own segment
    std::unique_ptr<BucketWeights> weights;
    std::unique_ptr<BucketGradients> gradients;
    size_t incomplete = 0;  // parameters whose gradient is not known to be complete
    bool late = false;      // summed too early in this step
    Event published;
    Buffer state_memory;
    TensorView master;                  // [segment]
    TensorView moments;                 // [2, segment]: exp_avg, exp_avg_sq
    bool shared = false;                // (e)gtp cuts its parameters
    const ShardPeers* peers = nullptr;  // of those
  };

  // What a step reads and writes beside buckets, on the device.
  struct StepMemory {
    StepMemory(Device device, int ranks);
    Tensor statistics, state, adamw;  // a GradStatistics, a StepState, an AdamWStep: uint8
    Tensor words, all_words;          // float64, with room for all losses, of a rank, of all
    Tensor input, report;             // of `step`
  };

  bool on_gpu() const { return config_.device.type == DeviceType::kCuda; }
  Bucket make_bucket(const BucketLayout& layout);
  void place_weights();
  // optimizer_checks.cpp
  void check_layouts() const;
  void check_owners() const;
  void compare_copies() const;
  // optimizer_gradients.cpp
  Bucket& bucket_of(int parameter);
  void zero_missing(const Bucket& bucket, Stream stream);
  void reduce_buckets(bool all, Stream stream);
  void reduce_late_buckets(Stream stream);
  void finish_gradients(Stream stream);

  // optimizer_step.cpp
  void check_losses(int64_t losses) const;
  StepRuleConfig rule() const;
  void write_state(StepState state);

  void await_drained(Stream stream) const;
  void gather_weights(Stream stream);

  std::vector<ParamSpec> specs_;
  OptimizerConfig config_;
  const GridGroups& groups_;
  comm::Communicator& world_;
  std::array<ShardPeers, 2> peers_;                    // of dense weights, of experts
  std::array<gtp::SlotArena::Block, 2> shard_memory_;  // what they gave
  std::vector<Bucket> buckets_;
  std::vector<size_t> bucket_index_;          // by parameter
  std::vector<std::vector<size_t>> domains_;  // the buckets of each domain, ascending
  std::vector<size_t> forward_;               // buckets in the order that a forward pass reads them
  std::vector<Parameter> parameters_;
  std::vector<bool> complete_;  // by parameter, in this step
  bool reported_ = false;       // one was, in this step
  GradStatisticsTable gradients_;
  AdamWTable update_;
  StepMemory step_;
  Stream stream_;  // the last one
};

}  // namespace moiety::optim
