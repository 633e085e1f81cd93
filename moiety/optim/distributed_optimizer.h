// The optimizer whose state is divided among the ranks (after ZeRO, Rajbhandari et al., SC 2020,
// and Megatron's distributed optimizer). It owns weights and gradients of the model in flat buckets
// (buffer_layout.h) and, for its own segment of each bucket, fp32 masters and moments.
//
// A step sums gradients over each parameter's domain, where every rank gets its segment; gathers
// the statistics of all ranks and combines them in rank order, so that all decide alike
// (step_rule.h); applies AdamW to the own segment; and all-gathers the weights.
//
// Frozen parameters (ParamSpec::frozen) have buckets of their own, without gradients, masters and
// moments: a step does nothing to them, and its norm leaves them out.
//
// Nothing is scaled before the update: backward gives gradients of a sum over tokens, and 1/tokens
// is applied once, with the clip factor. A skipped step changes only `skips_in_row` and `halt`.
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
#include "moiety/comm/symmetric_buffer.h"
#include "moiety/gtp/slot_arena.h"
#include "moiety/optim/adamw.h"
#include "moiety/optim/bucket_gradients.h"
#include "moiety/optim/bucket_weights.h"
#include "moiety/optim/buffer_layout.h"
#include "moiety/optim/frozen_values.h"
#include "moiety/optim/grad_norm.h"
#include "moiety/optim/grid_groups.h"
#include "moiety/optim/lane_stream.h"
#include "moiety/optim/parameter.h"
#include "moiety/optim/state_view.h"
#include "moiety/optim/step_decision.h"
#include "moiety/optim/step_report.h"
#include "moiety/optim/weight_cast.h"

namespace moiety::optim {

struct OptimizerConfig {
  AdamW adam{};
  DType weights = DType::kBFloat16;  // storage of the weights: bfloat16 or float32
  DType moments = DType::kFloat32;   // or bfloat16, with stochastic rounding
  uint64_t seed = 0;                 // seed of that rounding
  NanGuard guard = NanGuard::kStep;
  int max_skips = 3;
  double spike_sigma = 0;
  int64_t bucket_elements = kBucketElements;
  DType main_grad = DType::kFloat32;  // or bfloat16
  // format in which ranks send it: also bfloat16, summed in fp32
  DType grad_wire = DType::kFloat32;
  // Every so many steps the ranks compare checksums of their copies of weights; 0: never. On GPUs
  // the caller does so, by compare_copies().
  int64_t compare_copies = 100;
  // The place of weights, gradients and state. On a GPU the optimizer is given one stream only:
  // gradients are written and weights read in its order. Weights and gradients of several ranks then
  // lie in memory that their domain shares (comm/symmetric_buffer.h), and no (e)gtp cuts them; what
  // travels does so beside that stream, on a lane (optim/lane_stream.h).
  Device device = {};
  // The update of a rank on a GPU with a lane is cut into groups of at least so many of its
  // elements, of which one travels while the next one is updated. No influence on results.
  int64_t group_elements = int64_t{16} << 20;
  // Where there is a lane: weights that forward reads late set out with it, by begin_forward, and not
  // with the step. No influence on results.
  bool late_weights = false;
};

// The functions of a transport by which (e)gtp peers gather shards (gtp/transport.h). Without
// functions there are no such peers.
struct ShardPeers {
  // Gives zeroed memory that the peers can gather from. Collective over the peers.
  std::function<gtp::SlotArena::Block(const std::string& what, int64_t bytes)> allocate;
  // Makes work that is run on the stream afterwards wait until it may overwrite shards (E7).
  std::function<void(const Stream&)> await_drained;
  // Says that the bucket's shards are written (E1).
  std::function<void(int32_t bucket, const Stream&)> publish;
};

// The shard of a parameter that (e)gtp cuts, as its peers find it.
struct SharedShard {
  int32_t bucket = 0;  // the bucket for ShardPeers::publish
  // The first of this rank's bytes that ShardPeers::allocate gave; the same offsets hold the same
  // arrays at all peers. Null if it gave none.
  const std::byte* memory = nullptr;
};

class DistributedOptimizer {
 public:
  // Makes the optimizer with zero weights and state. Collective. All ranks pass the same parameters
  // in the same order, except for the parts that they hold. `groups`, and the objects that the
  // functions of `dense` and `experts` use, outlive the optimizer. Throws, on every rank, if the
  // ranks disagree about the layout (kComm) or if an element of a logical tensor has no owner or
  // several (kInvalidArgument).
  DistributedOptimizer(std::vector<ParamSpec> specs, const OptimizerConfig& config,
                       const GridGroups& groups, ShardPeers dense = {}, ShardPeers experts = {});
  DistributedOptimizer(const DistributedOptimizer&) = delete;
  DistributedOptimizer& operator=(const DistributedOptimizer&) = delete;

  // The parameters in the order of the specs; addresses do not change. Backward adds to `grad` (or
  // overwrites it, see Parameter::overwrite) any number of times before a step; a parameter without
  // a contribution counts as gradient zero.
  std::span<Parameter> parameters() { return parameters_; }

  // Begins the first forward pass of a step: weights that the step before has left set out, beside
  // the stream. Collective; needed with OptimizerConfig::late_weights alone, and free otherwise.
  void begin_forward(const Stream& stream);
  // Makes the stream wait for those weights of the parameters [0, end).
  void await_weights(int end, const Stream& stream);
  // Brings weights that a step has left here in the order of the stream, for whoever reads weights
  // between steps. Collective; it moves them each time, since a graph that is launched again tells
  // nobody that it has left some.
  void complete_weights(const Stream& stream);

  // Sets initial masters, zero moments and t = 0, and publishes the weights. Collective.
  void initialize(uint64_t seed, Stream stream);

  // Says that the gradient of a parameter is complete when `event` is. A bucket with only complete
  // gradients is summed beside the rest of backward, in an order that is the same on all ranks; the
  // others are summed at the step. A parameter that is never reported counts as complete then. If
  // one rank of a domain reports anything in a step, all do.
  void on_grad_ready(int parameter, const Event& event);
  // Says that in the order of the stream the gradients of all parameters from `first` on, in the
  // order of the specs, are complete; `first` falls from call to call. Also those count that had no
  // contribution.
  void on_grads_ready(int first, const Stream& stream);
  // Says that a complete gradient will get more. Waits until nobody reads it; it is summed again,
  // with the same bits as if it had not been complete.
  void on_grad_late(int parameter);
  // Lets work that is run on the stream afterwards read the parameter's published weights.
  void ensure_ready(int parameter, const Stream& stream) const;
  // The shard of a parameter that (e)gtp cuts; its arrays are those of `parameters()`.
  std::optional<SharedShard> shared_shard(int parameter) const;

  // Runs a step. Collective. Gradients begin anew afterwards.
  StepReport step(const StepInput& input, Stream stream);
  // Runs a step in the order of the stream, without bringing anything to the host. `input` and
  // `report` are float64 vectors, on the optimizer's device, of the words of step_words.h, with the
  // same number of losses. On a GPU the host waits for nothing and allocates nothing, so that a
  // step can be captured in a graph.
  void enqueue(TensorView input, TensorView report, Stream stream);
  // The report in the words that `enqueue` wrote, copied to the host.
  StepReport read_report(TensorView on_host) const;
  // int32 [1], on the device: not 0 if the last step changed nothing.
  TensorView skip() const;
  // Begins gradients anew without a step: contributions and reports since the last step are void.
  // Waits for sums that have begun; all ranks of a domain call it, after the same reports.
  void begin_gradients();

  // This rank's masters ("weight") and moments; of frozen parameters the weights, float32 in host
  // memory, which are valid until `publish`, which takes what was written there, or `end_view`.
  StateView state_view();
  // Every so many steps the caller compares copies between steps; 0: a step does so by itself, or no
  // rank has copies.
  int64_t compare_interval() const {
    return on_gpu() && world_.size() > 1 ? config_.compare_copies : 0;
  }
  // Throws Error(kComm) on all ranks if two have different copies of weights. Collective; waits for
  // the stream.
  void compare_copies();

  // Gives the memory back that state_view took for frozen parameters.
  void end_view();
  // The rest of the state, which is the same on all ranks. This function and the next two wait for
  // the stream on which the optimizer worked last.
  StepState step_state() const;
  // Restores `t`, `skips_in_row`, `halt` and `losses` of a saved state; the powers follow from t.
  void restore(StepState state);
  void clear_halt();
  // Sets weights := masters rounded, on all ranks, after masters were loaded or formats changed.
  // Collective.
  void publish(Stream stream);
  // Sets the formats in which weights are kept, by parameter, from the next publish on. Collective.
  // Weights move; masters, moments and gradients stay. Parameters of one format class change alike.
  void set_formats(std::span<const std::optional<QuantSpec>> formats, Stream stream);

 private:
  struct Bucket {
    BucketLayout layout;
    comm::Communicator* domain = nullptr;
    comm::Communicator* holders = nullptr;  // all ranks that hold elements of its uncut weights
    std::vector<ElementRun> runs;           // runs of the own segment
    std::unique_ptr<BucketWeights> weights;
    std::unique_ptr<BucketGradients> gradients;
    size_t incomplete = 0;               // parameters whose gradient is not known to be complete
    bool late = false;                   // summed too early in this step
    size_t segment = 0;                  // of gradients_
    Event summed;                        // on the lane
    Event published;                     // the weights, on the lane where they are late
    std::optional<FrozenValues> frozen;  // instead of all that follows, and of gradients
    Buffer state_memory;
    TensorView master;                  // [segment]
    TensorView moments;                 // [2, segment]: exp_avg, exp_avg_sq
    bool shared = false;                // whether (e)gtp cuts its parameters
    const ShardPeers* peers = nullptr;  // the peers that gather them
  };

  // The numbers that a step reads and writes beside the buckets, on the device.
  struct StepMemory {
    StepMemory(Device device, int ranks);
    Tensor statistics, state, adamw;  // uint8 each: a GradStatistics, a StepState, an AdamWStep
    Tensor words, all_words;  // float64 with room for all losses: words of this rank, of all ranks
    Tensor input, report;     // words of `step`
  };

  // Memory of the ranks of a domain on GPUs, where they read each other's gradients and weights.
  struct DomainMemory {
    comm::Communicator* domain = nullptr;
    comm::SymmetricBuffer gradients, weights;
    int64_t bytes = 0;  // of the one that is being made: needed, then taken
  };

  bool on_gpu() const { return config_.device.type == DeviceType::kCuda; }
  bool shares(comm::Communicator& domain) const;
  DomainMemory& memory_of(comm::Communicator& domain);
  void share(comm::SymmetricBuffer DomainMemory::*part, const char* what,
             std::span<const BucketLayout> layouts,
             const std::function<int64_t(const BucketLayout&)>& bytes_of);
  // Takes bytes of the domain's memory; null if it needs none.
  std::byte* take(comm::Communicator& domain, comm::SymmetricBuffer DomainMemory::*part,
                  int64_t bytes);
  Bucket make_bucket(const BucketLayout& layout);
  void make_state(Bucket& bucket);
  void place_weights();
  // optimizer_checks.cpp
  void check_layouts() const;
  void check_owners() const;
  std::vector<uint64_t> copy_checksums();
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

  void make_casts();
  void cast_weights(bool all, Stream stream);
  void await_drained(Stream stream) const;
  // Gathers weights that a step has changed, or all; but for those that travel on the lane.
  void gather_weights(bool all, Stream stream);
  // Whether the bucket's weights travel beside the update of others.
  bool travels_on_lane(const Bucket& b) const {
    return lane_ && !b.frozen && b.weights->own_storage().defined();
  }
  void gather_on(const Bucket& bucket, const Stream& stream) const;
  void make_updates();
  void find_late();
  void find_fault_words();
  void update(Stream stream);
  // Makes the lane go on behind the stream.
  void fork(const Stream& stream);
  // Makes the stream wait for an event of the lane, or for all of it, and times that.
  void stand(const Event& event, const Stream& stream);
  void join(const Stream& stream);
  void take_statistics(const Stream& stream);

  std::vector<ParamSpec> specs_;
  OptimizerConfig config_;
  const GridGroups& groups_;
  comm::Communicator& world_;
  std::array<ShardPeers, 2> peers_;                    // for dense weights, for experts
  std::array<gtp::SlotArena::Block, 2> shard_memory_;  // memory that they gave
  std::vector<DomainMemory> domain_memory_;            // in the order of the buckets
  std::vector<Bucket> buckets_;
  struct Cast {
    bool frozen = false;
    WeightCast weights;
  };
  std::vector<Cast> casts_;                   // of weights that are kept in a format
  std::vector<size_t> bucket_index_;          // by parameter
  std::vector<std::vector<size_t>> domains_;  // the trained buckets of each domain, ascending
  std::vector<size_t> forward_;               // buckets in the order that a forward pass reads them
  std::vector<Parameter> parameters_;
  std::vector<bool> complete_;  // by parameter, in this step
  bool reported_ = false;       // at least one was reported in this step
  GradStatisticsTable gradients_;
  // On a lane: the buckets in the order in which they set out in this step, and how many had when
  // backward told the last time that gradients are complete.
  std::vector<size_t> set_out_;
  size_t set_out_before_ = 0;
  struct Update {
    AdamWTable table;
    std::vector<size_t> buckets;
    int64_t elements = 0;
    bool late = false;  // whether its weights set out with the next forward pass
  };
  std::vector<Update> updates_;  // in the order in which they run
  std::vector<size_t> late_;     // the buckets whose weights do, in the order of forward_
  size_t awaited_ = 0;           // how many of them forward has waited for
  bool begun_ = false;           // whether forward has been begun since the last step
  StepMemory step_;
  Tensor checksums_;                // on a GPU: uint64, two of each bucket
  Stream stream_;                   // the stream of the last work
  std::optional<LaneStream> lane_;  // where several ranks on GPUs sum and gather
  Tensor stands_;                   // clock of the waits for it
  Tensor fault_words_;              // their addresses, uint64
  Event forked_, joined_;
};

}  // namespace moiety::optim
