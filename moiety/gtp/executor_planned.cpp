// Steps that follow their plan, and the making of plans.
#include <algorithm>

#include "moiety/base/error.h"
#include "moiety/base/log.h"
#include "moiety/gtp/executor_impl.h"

namespace moiety::gtp {

bool Executor::Impl::as_planned(Kind kind, std::span<const BundleId> bundles) const {
  if (at_ >= plan_->plan.positions) return false;
  const auto call = plan_->time.call(at_);
  if (kind == Kind::kCut) return call[0].kind == kind;
  return std::equal(
      call.begin(), call.end(), bundles.begin(), bundles.end(),
      [&](const TraceEvent& e, BundleId b) { return e.kind == kind && e.bundle == b; });
}

void Executor::Impl::begin_planned(const Stream& stream) {
  if (!plan_->untouched.empty()) {
    for (const BundleId b : plan_->untouched) zero_gradients(b, stream);
    Event zeroed;
    zeroed.record(stream);
    for (const BundleId b : plan_->untouched) report(b, zeroed);
  }
  issue(0);
}

void Executor::Impl::consume_planned(std::span<const BundleId> bundles, Phase phase,
                                     std::span<View> views, const Stream& stream) {
  const Plan& plan = plan_->plan;
  for (size_t i = 0; i < bundles.size(); ++i) {
    if (layouts_[bundles[i]].ranks() == 1) views[i] = whole(bundles[i], phase, stream);
  }
  for (const int32_t g : plan.waits[at_]) {
    const Gather& gather = plan.gathers[g];
    plan_->events[gather.ready_event].wait(stream);
    const auto at = std::find(bundles.begin(), bundles.end(), gather.bundle) - bundles.begin();
    views[at] = plan_->landed[g]->view;
  }
}

void Executor::Impl::end_planned_reads(int32_t p, const Stream& stream) {
  for (const int32_t g : plan_->plan.waits[p]) {
    const Gather& gather = plan_->plan.gathers[g];
    // A gather with several uses may have readers on other streams.
    if (gather.first_use == gather.last_use) poison(plan_->slots[gather.slot].memory, stream);
    if (gather.read_event == kNone) continue;
    Marks& read = plan_->events[gather.read_event];
    if (p == gather.first_use) read.clear();
    read.record(stream);
  }
}

void Executor::Impl::open_planned(BundleId b, const Stream& stream) {
  const int32_t r = plan_->plan.reduce_at[at_];
  const int32_t before = plan_->reduce_before[r];
  if (before != kNone) plan_->events[plan_->plan.reduces[before].event].wait(stream);
  const int32_t slot = plan_->plan.reduces[r].slot;
  if (slot != kNone) steps_[b].send = plan_->slots[slot];
}

void Executor::Impl::reduce_planned(BundleId b, bool first, const Stream& stream) {
  const Reduce& r = plan_->plan.reduces[plan_->plan.reduce_at[at_]];
  ExecutorLane* lane = nullptr;
  if (r.lane != kNone) {
    lane = &use(plan_->lanes[r.lane]);
    const int32_t scratch = plan_->plan.lanes[r.lane].scratch;
    const int64_t bytes = reduce_of(b).scratch;
    send(b, first, bytes > 0 ? plan_->slots[scratch].memory.slice(0, 0, bytes) : TensorView(),
         *lane, stream);
  }
  const Stream& on = lane ? lane->stream : stream;
  if (r.last) {
    Event accumulated;
    accumulated.record(on);
    report(b, accumulated);
  }
  if (r.event == kNone) return;
  if (lane) transports_[lane->group]->await_readers(lane->expert, lane->stream);
  plan_->events[r.event].clear();
  plan_->events[r.event].record(on);
}

void Executor::Impl::issue(int32_t p) {
  for (const int32_t g : plan_->plan.issues[p]) {
    const Gather& planned = plan_->plan.gathers[g];
    ExecutorLane& lane = use(plan_->lanes[planned.lane]);
    const int32_t before = plan_->gather_before[g];
    if (before != kNone) plan_->events[plan_->plan.gathers[before].read_event].wait(lane.stream);
    gather(planned.bundle, *plan_->landed[g], lane);
    plan_->events[planned.ready_event].clear();
    plan_->events[planned.ready_event].record(lane.stream);
  }
}

// Makes the recorded step the plan of its key.
void Executor::Impl::seal() {
  const std::span<const TraceEvent> trace = recorder_.seal();
  const bool departed = key_->plan != nullptr;
  if (departed && key_->replaced == kMostReplacements) {
    key_->plan.reset();
    key_->on_demand = true;
    log(LogLevel::kWarning,
        "gtp executor: steps of {} {} left their plan {} times in a row; they run on demand",
        name_->kind, name_->batches, kMostReplacements + 1);
    return;
  }
  // Ranks that may leave a plan alone make their plans alone.
  const bool together =
      !departed || std::any_of(transports_.begin(), transports_.end(),
                               [](const Transport* t) { return t && !t->gathers_alone(); });
  if (ranks_ && together) {
    compare_traces(*ranks_, text("{} {}", name_->kind, name_->batches), trace);
  }
  auto made = together ? compile(trace, options_.policy) : compile_alone(trace);
  if (!made) return;
  key_->plan = std::move(made);
  key_->replaced += departed;
}

std::unique_ptr<StepPlan> Executor::Impl::compile(std::span<const TraceEvent> trace,
                                                  const Policy& policy) {
  auto out = std::make_unique<StepPlan>(trace);
  out->plan = plan(trace, specs_, policy);
  out->slots = arena_.place(out->plan.slots);
  reserve_calls(out->time);
  bind(*out);
  return out;
}

// A plan with the present send slots, if need be with as few as possible; null if they are too
// small.
std::unique_ptr<StepPlan> Executor::Impl::compile_alone(std::span<const TraceEvent> trace) {
  Policy fewest = options_.policy;
  fewest.send_bytes = 0;
  std::unique_ptr<StepPlan> out;
  alone_ = true;
  for (const Policy& policy : {options_.policy, fewest}) {
    try {
      out = compile(trace, policy);
      break;
    } catch (const NoRoom&) {
    } catch (...) {
      alone_ = false;
      throw;
    }
  }
  alone_ = false;
  return out;
}

void Executor::Impl::bind(StepPlan& out) {
  const Plan& plan = out.plan;
  for (const LaneSpec& l : plan.lanes) {
    out.lanes.push_back(lane_of(l.group, l.expert, l.reduces));
  }
  out.events.resize(plan.events);
  out.gather_before.assign(plan.gathers.size(), kNone);
  out.reduce_before.assign(plan.reduces.size(), kNone);
  for (size_t i = 0; i < plan.gathers.size(); ++i) {
    const Gather& g = plan.gathers[i];
    if (g.next != kNone) out.gather_before[g.next] = static_cast<int32_t>(i);
    const int32_t scratch = plan.lanes[g.lane].scratch;
    const bool needs_scratch = specs_[g.bundle].gather_of(g.views).scratch > 0;
    out.landed.push_back(&landings_.at(g.bundle, layouts_[g.bundle], g.views,
                                       out.slots[g.slot].memory,
                                       needs_scratch ? out.slots[scratch].memory : TensorView()));
  }
  std::vector<bool> touched(bundles_.size());
  for (size_t i = 0; i < plan.reduces.size(); ++i) {
    const Reduce& r = plan.reduces[i];
    if (r.next != kNone) out.reduce_before[r.next] = static_cast<int32_t>(i);
    touched[r.bundle] = true;
  }
  for (BundleId b = 0; b < static_cast<BundleId>(bundles_.size()) && !plan.reduces.empty(); ++b) {
    if (layouts_[b].trained() && !touched[b]) out.untouched.push_back(b);
  }
}

}  // namespace moiety::gtp
