// The executor of GTP: it gathers weights before they are read and reduces their gradients, in the
// order of a plan (docs/spec/gtp.md#executor).
//
//    StepScope step = executor.begin_step({"train", 8}, stream);
//    View w = executor.materialize(bundle, Phase::kFwd, {.flops = .., .bytes = ..}, stream);
//    ... GEMMs on `stream` that read w ...
//    View dw = executor.grad_buffer(bundle, stream);
//    ... the GEMM that writes dw ...
//    executor.reduce(bundle, stream);
//    executor.flush(stream);
//
// The first step of a key runs on demand, with every gather where it is needed, and is recorded;
// later steps of the key follow the plan that is made of it. A step that leaves the recorded order
// continues on demand, with the same bits, and its own order is planned for the next time.
//
// Views are good until the next call of the executor: readers and writers are enqueued before it.
// The caller's streams of a step begin behind begin_step's stream and have been joined by flush's.
// A bundle whose group has one rank is not moved at all: its views are the shards and main_grads.
//
// A step in which there is a gradient, or was to be one by its plan, reports all trained weights;
// those without contributions are zero. Any other step (evaluation) leaves main_grads alone.
//
// A model and rank has one executor; calls never overlap. Ranks make the same calls in the same
// order; a rank alone may leave the order as far as its transports gather alone and its reduces
// keep theirs.
#pragma once

#include <compare>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "moiety/base/stream.h"
#include "moiety/comm/bootstrap.h"
#include "moiety/gtp/bundle.h"
#include "moiety/gtp/grad_sink.h"
#include "moiety/gtp/recorder.h"
#include "moiety/gtp/step_scope.h"

namespace moiety::gtp {

enum class Phase : uint8_t { kFwd, kBwd, kRecompute };

// The key of a step. Steps with equal keys are expected to make the same calls.
struct StepKey {
  std::string kind;     // "train", "eval"
  int64_t batches = 1;  // micro-batches, or any other number that changes the calls
  friend auto operator<=>(const StepKey&, const StepKey&) = default;
};

struct ExecutorOptions {
  Policy policy{};  // rank 0's is used
  Device device{};
  // dtype in which gradients with float32 main_grads travel; or bfloat16
  DType wire = DType::kFloat32;
  // Makes the streams of lanes; if empty, Stream::on(device) does.
  std::function<Stream()> make_lane;
  // Every so many steps, the first among them, peers compare the amax and tensor scales of their
  // shards, which do not travel: a shard quantized with its own would be decoded with another's.
  // flush then waits for its stream. 0: never.
  int64_t compare_scales = 100;
  // Fills slots with NaN behind their last use, and send slots before they are written.
#ifdef NDEBUG
  bool poison = false;
#else
  bool poison = true;
#endif
};

struct StepCounts {
  struct Moved {
    int64_t gathers = 0, reduces = 0;   // operations
    int64_t gathered = 0, reduced = 0;  // bytes received; for rows as BundleSpec::Rows has them
    int64_t lookups = 0;
  };
  Moved dense, expert;
  bool planned = false;  // followed its plan to the end
};

struct ExecutorCounts {
  int64_t steps = 0;       // steps that were flushed
  int64_t planned = 0;     // those that followed their plan
  int64_t departures = 0;  // steps that left their plan
  int64_t abandoned = 0;   // steps that ended by an exception
  StepCounts step;         // counts of the latest step
  int64_t arena_bytes = 0;
};

class Executor {
 public:
  // Makes an executor. Collective. `transports` are by group, null for groups of one rank; `ranks`
  // are all ranks that make the same calls, null for one. The arguments outlive the executor;
  // `sink` may be null if no weight is trained. Throws Error(kInvalidArgument) for weights that are
  // not in exactly one bundle, and what the transports throw.
  Executor(std::vector<ShardedWeight> weights, std::vector<Bundle> bundles,
           std::vector<Transport*> transports, const ExecutorOptions& options,
           comm::Bootstrap* ranks, ParamSource& source, GradSink* sink);
  // Waits for operations in flight.
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  StepScope begin_step(const StepKey& key, const Stream& stream);

  // The full weights of these bundles, one view each, for work on `stream`, which `work` describes.
  void materialize(std::span<const BundleId> bundles, Phase phase, Work work, std::span<View> views,
                   const Stream& stream);
  View materialize(BundleId bundle, Phase phase, Work work, const Stream& stream);

  // Memory for a contribution to the bundle's gradients, summed over the local tokens, in
  // view.data's dtype. Unless view.accumulate it has no contents, and every element is to be
  // written. `reduce`, on the stream of the writer, follows before the bundle's next grad_buffer.
  View grad_buffer(BundleId bundle, const Stream& stream);
  void reduce(BundleId bundle, const Stream& stream);

  // Looks up rows: out[t] = row token[t], or zero. For a bundle with Bundle::row_tokens and at most
  // that many tokens (embedding.h); its whole weight and gradient may be asked for, too. `faults`
  // counts invalid tokens.
  void look_up(BundleId bundle, TensorView token_T, TensorView out_TD, TensorView faults, Work work,
               const Stream& stream);
  // Contributes dout[t] to row token[t] of the bundle's gradient; grad_buffer and reduce in one.
  void add_rows(BundleId bundle, TensorView token_T, TensorView dout_TD, Work work,
                const Stream& stream);

  // Adds more work behind the latest call: attention, dispatch.
  void note_work(Work work);
  // Marks the border of two graph segments. No model of this repository makes one yet.
  void cut();
  // Ends the step: work that is run on `stream` later is behind all its gathers and reduces.
  // Collective where the step is planned anew and where scales are compared. A second call does
  // nothing.
  void flush(const Stream& stream);

  const ExecutorCounts& counts() const;
  const BundleSpec& bundle(BundleId bundle) const;
  // The plan of a key; null if its steps run on demand.
  const Plan* plan_of(const StepKey& key) const;
  // The calls from which the plan was made.
  std::span<const TraceEvent> trace_of(const StepKey& key) const;

 private:
  friend class StepScope;
  void abandon(int64_t step) noexcept;

  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moiety::gtp
