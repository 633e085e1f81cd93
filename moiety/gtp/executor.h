// Gathers weights before they are read and reduces their gradients, in the order of a plan
// (docs/spec/gtp.md#executor).
//
//   StepScope step = executor.begin_step({"train", 8}, stream);
//   View w = executor.materialize(bundle, Phase::kFwd, {.flops = .., .bytes = ..}, stream);
//   ... GEMMs on `stream` that read w ...
//   View dw = executor.grad_buffer(bundle, stream);
//   ... the GEMM that writes dw ...
//   executor.reduce(bundle, stream);
//   executor.flush(stream);
//
// The first step of a key runs on demand, every gather where it is needed, and is recorded; from
// then on steps of the key follow the plan made of it. A step that leaves the recorded order goes
// on on demand, with the same bits, and its own order is planned for the next time.
//
// Views are good until the next call of the executor: readers and writers are enqueued before it.
// The caller's streams of a step begin behind begin_step's stream and have been joined by flush's.
// With one rank in its group a bundle is not moved at all: views are the shards and main_grads.
//
// A step in which there is a gradient, or by its plan was to be one, reports all trained weights,
// those without contributions as zero; any other (evaluation) leaves main_grads alone.
//
// One executor a model and rank; calls never overlap. Ranks make the same calls in the same order;
// a rank alone may leave it as far as its transports gather alone and reduces keep their order.
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

// Steps of equal keys are expected to make the same calls.
struct StepKey {
  std::string kind;     // "train", "eval"
  int64_t batches = 1;  // micro-batches, or whatever else changes the calls
  friend auto operator<=>(const StepKey&, const StepKey&) = default;
};

struct ExecutorOptions {
  Policy policy{};  // rank 0's counts
  Device device{};
  DType wire = DType::kFloat32;  // of gradients with float32 main_grads; or bfloat16
  // Makes the streams of lanes; none: Stream::on(device).
  std::function<Stream()> make_lane;
  // Every so many steps, the first among them, peers compare amax and tensor scales of their
  // shards, which do not travel: a shard quantized with its own would be decoded with another's.
  // flush waits for its stream then. 0: never.
  int64_t compare_scales = 100;
  // Slots are filled with NaN behind their last use, and send slots before they are written.
#ifdef NDEBUG
  bool poison = false;
#else
  bool poison = true;
#endif
};

struct StepCounts {
  struct Moved {
    int64_t gathers = 0, reduces = 0;   // operations
    int64_t gathered = 0, reduced = 0;  // bytes received; of rows as BundleSpec::Rows has them
    int64_t lookups = 0;
  };
  Moved dense, expert;
  bool planned = false;  // to the end
};

struct ExecutorCounts {
  int64_t steps = 0;       // flushed
  int64_t planned = 0;     // of them, as planned
  int64_t departures = 0;  // steps that left their plan
  int64_t abandoned = 0;   // steps that ended by an exception
  StepCounts step;         // of the latest step
  int64_t arena_bytes = 0;
};

class Executor {
 public:
  // Collective. `transports` by group, null for groups of one rank; `ranks` are all that make the
  // same calls, null for one. What is passed outlives the executor; `sink` may be null if no
  // weight is trained. Throws Error(InvalidArgument) for weights that are not in exactly one
  // bundle, and as the transports do.
  Executor(std::vector<ShardedWeight> weights, std::vector<Bundle> bundles,
           std::vector<Transport*> transports, const ExecutorOptions& options,
           comm::Bootstrap* ranks, ParamSource& source, GradSink* sink);
  // Waits for what is in flight.
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  StepScope begin_step(const StepKey& key, const Stream& stream);

  // The full weights of these bundles, one view each, for work on `stream`; `work` is that work.
  void materialize(std::span<const BundleId> bundles, Phase phase, Work work, std::span<View> views,
                   const Stream& stream);
  View materialize(BundleId bundle, Phase phase, Work work, const Stream& stream);

  // Memory for a contribution to the bundle's gradients: summed over the local tokens, in
  // view.data's dtype. Unless view.accumulate it holds nothing, and every element of it is to be
  // written. `reduce`, on the stream of the writer, follows before the bundle's next grad_buffer.
  View grad_buffer(BundleId bundle, const Stream& stream);
  void reduce(BundleId bundle, const Stream& stream);

  // By rows, of a bundle with Bundle::row_tokens, for at most so many tokens (embedding.h); whole
  // weight and gradient of it may be asked for, too. out[t] = row token[t], or zero; `faults`
  // counts tokens that are none.
  void look_up(BundleId bundle, TensorView token_T, TensorView out_TD, TensorView faults, Work work,
               const Stream& stream);
  // A contribution to its gradient: dout[t] to row token[t]. grad_buffer and reduce in one.
  void add_rows(BundleId bundle, TensorView token_T, TensorView dout_TD, Work work,
                const Stream& stream);

  // More work behind the latest call: attention, dispatch.
  void note_work(Work work);
  // Border of two graph segments. No model of this repository makes one yet.
  void cut();
  // Ends the step: what runs on `stream` later is behind all its gathers and reduces. Collective
  // where the step is planned anew and where scales are compared. Once more does nothing.
  void flush(const Stream& stream);

  const ExecutorCounts& counts() const;
  const BundleSpec& bundle(BundleId bundle) const;
  // Null: steps of this key run on demand.
  const Plan* plan_of(const StepKey& key) const;
  // The calls that it was made of.
  std::span<const TraceEvent> trace_of(const StepKey& key) const;

 private:
  friend class StepScope;
  void abandon(int64_t step) noexcept;

  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moiety::gtp
