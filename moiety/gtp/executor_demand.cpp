// Steps without a plan: gathers run where they are needed, in memory that plans use too.
#include <algorithm>

#include "moiety/gtp/executor_impl.h"

namespace moiety::gtp {

// Leaves the plan at a call that differs from it: from here on the step runs on demand. The device
// waits for operations in flight and for readers; then all memory is free except that of open
// gradients.
void Executor::Impl::depart() {
  for (const auto& lane : lanes_) {
    if (!lane->used) continue;
    if (lane->reduces) transports_[lane->group]->await_readers(lane->expert, lane->stream);
    joined_.emplace_back().record(lane->stream);
  }
  for (const Stream& s : streams_) joined_.emplace_back().record(s);
  for (const Event& e : joined_) {
    for (const auto& lane : lanes_) lane->stream.wait(e);
    for (const Stream& s : streams_) s.wait(e);
  }
  const auto calls = static_cast<size_t>(plan_->time.first[at_]);
  recorder_.begin(std::span(plan_->trace).first(calls));
  plan_ = nullptr;
  ++counts_.departures;
}

void Executor::Impl::consume_on_demand(std::span<const BundleId> bundles, Phase phase,
                                       std::span<View> views, const Stream& stream) {
  std::vector<SlotArena::Slot> apart = kept_;
  const auto piece = [&](int64_t bytes) {
    if (bytes == 0) return TensorView();
    apart.push_back(arena_.demand({}, bytes, apart));
    return apart.back().memory;
  };
  for (size_t i = 0; i < bundles.size(); ++i) {
    const BundleId b = bundles[i];
    const BundleLayout& layout = layouts_[b];
    if (layout.ranks() == 1) {
      views[i] = whole(b, phase, stream);
      continue;
    }
    const Views wanted = specs_[b].view_of(kind_of(phase));
    const BundleSpec::Transfer& needs = specs_[b].gather_of(wanted);
    const TensorView slot = piece(needs.slot), scratch = piece(needs.scratch);
    const Landed& landed = landings_.at(b, layout, wanted, slot, scratch);
    ExecutorLane& lane = use(lane_of(specs_[b].group, specs_[b].expert, false));
    lane.stream.wait(read_);
    gather(b, landed, lane);
    lane.edge.record(lane.stream);
    stream.wait(lane.edge);
    views[i] = landed.view;
  }
  pieces_.assign(apart.begin() + static_cast<std::ptrdiff_t>(kept_.size()), apart.end());
}

void Executor::Impl::open_on_demand(BundleId b, const Stream& stream) {
  BundleStep& state = steps_[b];
  const BundleSpec& spec = specs_[b];
  if (spec.group_size == 1) {
    if (state.added > 0) stream.wait(state.contributed);
    return;
  }
  std::vector<SlotArena::Slot> open;
  for (size_t other = 0; other < steps_.size(); ++other) {
    if (steps_[other].open && specs_[other].group == spec.group && specs_[other].group_size > 1) {
      open.push_back(steps_[other].send);
    }
  }
  state.send = arena_.demand({true, spec.group}, reduce_of(b).slot, open);
  for (const auto& lane : lanes_) {
    if (lane->reduces && lane->group == spec.group && lane->used) stream.wait(lane->sent);
  }
}

void Executor::Impl::reduce_on_demand(BundleId b, bool first, const Stream& stream) {
  const BundleSpec& spec = specs_[b];
  if (spec.group_size == 1) {
    steps_[b].contributed.record(stream);
    return;
  }
  ExecutorLane& lane = use(lane_of(spec.group, spec.expert, true));
  send(b, first, demand_scratch(b, lane), lane, stream);
  transports_[lane.group]->await_readers(lane.expert, lane.stream);
  lane.sent.record(lane.stream);
}

// The memory of a lane's reduces is kept to the end of the step: they run beside the next gathers.
TensorView Executor::Impl::demand_scratch(BundleId b, ExecutorLane& lane) {
  const int64_t bytes = reduce_of(b).scratch;
  if (bytes == 0) return {};
  if (!lane.scratch.memory.defined()) {
    int64_t most = 0;
    for (const BundleSpec& s : specs_) {
      if (s.group == lane.group && s.expert == lane.expert && s.group_size > 1) {
        most = std::max({most, s.reduce.scratch, s.rows.reduce.scratch});
      }
    }
    lane.scratch = arena_.demand({}, most, kept_);
    kept_.push_back(lane.scratch);
    lane.stream.wait(read_);
  }
  return lane.scratch.memory.slice(0, 0, bytes);
}

// Takes memory for these calls on demand, so that a departure need not allocate.
void Executor::Impl::reserve_calls(const Timeline& time) {
  std::vector<SlotArena::Slot> kept;
  std::map<std::pair<int, bool>, int64_t> scratch;
  for (const BundleSpec& s : specs_) {
    int64_t& most = scratch[{s.group, s.expert}];
    if (s.group_size > 1) most = std::max({most, s.reduce.scratch, s.rows.reduce.scratch});
  }
  for (const auto& [lane, bytes] : scratch) {
    if (bytes > 0) kept.push_back(arena_.demand({}, bytes, kept));
  }
  for (int32_t p = 0; p < time.positions; ++p) {
    std::vector<SlotArena::Slot> apart = kept;
    for (const TraceEvent& e : time.call(p)) {
      if (!is_consume(e.kind) || specs_[e.bundle].group_size == 1) continue;
      const auto& needs = specs_[e.bundle].gather_of(specs_[e.bundle].view_of(e.kind));
      for (const int64_t bytes : {needs.slot, needs.scratch}) {
        if (bytes > 0) apart.push_back(arena_.demand({}, bytes, apart));
      }
    }
  }
}

// Reports, at the end of a step on demand, all weights that have not been reported, if there was a
// gradient.
void Executor::Impl::report_rest(const Stream& stream) {
  const bool trains = std::any_of(steps_.begin(), steps_.end(),
                                  [](const BundleStep& s) { return s.added > 0 || s.reported; });
  if (!trains) return;
  std::vector<BundleId> rest;
  for (BundleId b = 0; b < static_cast<BundleId>(steps_.size()); ++b) {
    if (!layouts_[b].trained() || steps_[b].reported) continue;
    if (steps_[b].added == 0) zero_gradients(b, stream);
    rest.push_back(b);
  }
  Event ready;
  ready.record(stream);
  for (const BundleId b : rest) report(b, ready);
}

}  // namespace moiety::gtp
