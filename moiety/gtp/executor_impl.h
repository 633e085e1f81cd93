// The executor's inside. Internal to moiety/gtp; the contract is in executor.h.
//
//    executor.cpp          begin to flush: the work of every call, in either mode
//    executor_planned.cpp  calls that follow the plan; plans are made here
//    executor_demand.cpp   calls of a step without a plan; departure from one
//    executor_rows.cpp     calls that move rows, in either mode
#pragma once

#include <atomic>
#include <initializer_list>
#include <map>
#include <memory>
#include <vector>

#include "moiety/gtp/executor.h"
#include "moiety/gtp/executor_parts.h"
#include "moiety/gtp/transport_mapped.h"

namespace moiety::gtp {

// The kind of a consume of this phase in the trace.
constexpr Kind kind_of(Phase phase) {
  constexpr Kind kKinds[] = {Kind::kFwd, Kind::kBwd, Kind::kRecompute};
  return kKinds[static_cast<int>(phase)];
}

class Executor::Impl {
 public:
  Impl(std::vector<ShardedWeight> weights, std::vector<Bundle> bundles,
       std::vector<Transport*> transports, const ExecutorOptions& options, comm::Bootstrap* ranks,
       ParamSource& source, GradSink* sink);
  ~Impl();

  // Opens the step and returns its number; enter_step does its first work.
  int64_t begin(const StepKey& key, const Stream& stream);
  void enter_step(const Stream& stream);
  void materialize(std::span<const BundleId> bundles, Phase phase, Work work, std::span<View> views,
                   const Stream& stream);
  View grad_buffer(BundleId b, const Stream& stream);
  void reduce(BundleId b, const Stream& stream);
  void look_up(BundleId b, TensorView token_T, TensorView out_TD, TensorView faults, Work work,
               const Stream& stream);
  void add_rows(BundleId b, TensorView token_T, TensorView dout_TD, Work work,
                const Stream& stream);
  void note_work(Work work);
  void cut();
  void flush(const Stream& stream);
  void abandon(int64_t step) noexcept;

  const ExecutorCounts& counts() const { return counts_; }
  const BundleSpec& spec(BundleId b) const;
  const StepPlan* step_plan(const StepKey& key) const;

 private:
  static constexpr int kMostReplacements = 3;  // replacements in a row

  struct Key {
    std::unique_ptr<StepPlan> plan;
    int replaced = 0;        // plans replaced since a step followed one
    bool on_demand = false;  // from now on for good
  };
  // A call in progress: calls of the executor do not overlap.
  class Call {
   public:
    explicit Call(Impl& impl);
    ~Call() { impl_.busy_ = false; }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    Impl& impl_;
  };

  // ---- executor.cpp
  void check_weights() const;
  void reserve();
  const BundleLayout& checked(const char* call, BundleId b) const;
  void enter(Kind kind, std::span<const BundleId> bundles, Work work);
  void end_reads();
  void see(const Stream& stream);
  void publish(BundleId b, const Stream& stream);
  View whole(BundleId b, Phase phase, const Stream& stream);
  size_t lane_of(int group, bool expert, bool reduces);
  ExecutorLane& use(size_t lane);
  void gather(BundleId b, const Landed& landed, ExecutorLane& lane);
  BundleStep& open_gradient(const char* call, BundleId b, Kind kind, Work work,
                            const Stream& stream);
  void end_gradient(BundleId b, const Stream& stream);
  const BundleSpec::Transfer& reduce_of(BundleId b) const {
    return specs_[b].reduce_of(steps_[b].by_rows);
  }
  void send(BundleId b, bool first, TensorView scratch, ExecutorLane& lane, const Stream& stream);
  void send_rows(BundleId b, bool first, TensorView scratch, ExecutorLane& lane);
  TensorView row_send(BundleId b) const;
  MappedTransport& rows_transport(const char* call, BundleId b) const;
  void report(BundleId b, const Event& event);
  void withdraw(BundleId b, const Stream& stream);
  void zero_gradients(BundleId b, const Stream& stream);
  void join_lanes(const Stream& stream);
  void compare_tensor_values(const Stream& stream);
  void close_step();
  StepCounts::Moved& moved(BundleId b);
  void poison(const TensorView& memory, const Stream& stream) const;
  SlotArena::Block allocate(Space space, int64_t bytes);
  bool planned() const { return plan_ != nullptr; }

  // ---- executor_planned.cpp
  bool as_planned(Kind kind, std::span<const BundleId> bundles) const;
  void begin_planned(const Stream& stream);
  void consume_planned(std::span<const BundleId> bundles, Phase phase, std::span<View> views,
                       const Stream& stream);
  void end_planned_reads(int32_t p, const Stream& stream);
  void open_planned(BundleId b, const Stream& stream);
  void reduce_planned(BundleId b, bool first, const Stream& stream);
  void issue(int32_t p);
  void seal();
  std::unique_ptr<StepPlan> compile(std::span<const TraceEvent> trace, const Policy& policy);
  std::unique_ptr<StepPlan> compile_alone(std::span<const TraceEvent> trace);
  void bind(StepPlan& out);

  // ---- executor_demand.cpp
  void depart();
  void consume_on_demand(std::span<const BundleId> bundles, Phase phase, std::span<View> views,
                         const Stream& stream);
  void open_on_demand(BundleId b, const Stream& stream);
  void reduce_on_demand(BundleId b, bool first, const Stream& stream);
  TensorView demand_scratch(BundleId b, ExecutorLane& lane);
  void reserve_calls(const Timeline& time);
  void report_rest(const Stream& stream);

  const std::vector<ShardedWeight> weights_;
  const std::vector<Bundle> bundles_;
  const std::vector<Transport*> transports_;
  ExecutorOptions options_;
  comm::Bootstrap* ranks_;
  ParamSource& source_;
  GradSink* sink_;

  std::vector<BundleLayout> layouts_;
  std::vector<BundleSpec> specs_;
  // At G == 1, by bundle: the shards, also with column views that are made from them.
  struct Whole {
    std::vector<QuantizedView> quantized, with_columns;
    View view, columns;
    std::vector<Buffer> memory;
    std::unique_ptr<quant::QuantizeTable> transposes;
  };
  std::vector<Whole> wholes_;
  void make_whole(BundleId b);

  LandingTable landings_;
  SlotArena arena_;
  std::vector<std::unique_ptr<ExecutorLane>> lanes_;
  std::map<StepKey, Key> keys_;
  Recorder recorder_;
  ExecutorCounts counts_;
  std::atomic<bool> busy_ = false;
  // Peers may not be making a plan too, so no memory for sends is added, which is collective.
  bool alone_ = false;
  struct NoRoom {};

  // ---- state of the step
  int64_t step_ = 0;
  bool in_step_ = false;
  const StepKey* name_ = nullptr;
  Key* key_ = nullptr;
  StepPlan* plan_ = nullptr;  // null if the step runs on demand
  int32_t at_ = 0;            // position of the call
  int32_t segment_ = 0;
  std::vector<BundleStep> steps_;  // by bundle
  std::vector<Stream> streams_;    // the caller's
  Event begun_;
  // events that streams and lanes wait for if they first appear after a departure
  std::vector<Event> joined_;
  Marks rows_read_;  // marks of the latest lookups in peers' shards
  // Whether the latest call's views are good, and whether that call is planned.
  bool reading_ = false, reading_planned_ = false;
  Stream reader_;
  // On demand: the memory of the latest consume, the memory of reduces, and the latest reader.
  std::vector<SlotArena::Slot> pieces_, kept_;
  Event read_;

  // ---- state between steps
  std::vector<Event> debris_;  // operations that an abandoned step left in flight
  bool abandoned_ = false;     // the step before was abandoned, and the sink does not know yet
  Event flushed_;
};

}  // namespace moiety::gtp
