#include "moiety/gtp/executor.h"

#include <algorithm>
#include <set>

#include "moiety/base/copy.h"
#include "moiety/base/error.h"
#include "moiety/base/log.h"
#include "moiety/gtp/executor_impl.h"
#include "moiety/quant/transpose.h"

namespace moiety::gtp {
// ---- construction

Executor::Impl::Impl(std::vector<ShardedWeight> weights, std::vector<Bundle> bundles,
                     std::vector<Transport*> transports, const ExecutorOptions& options,
                     comm::Bootstrap* ranks, ParamSource& source, GradSink* sink)
    : weights_(std::move(weights)),
      bundles_(std::move(bundles)),
      transports_(std::move(transports)),
      options_(options),
      ranks_(ranks),
      source_(source),
      sink_(sink),
      arena_([this](Space space, int64_t bytes) { return allocate(space, bytes); }),
      recorder_(options_.policy = ranks ? agree_policy(*ranks, options.policy) : options.policy) {
  check_weights();
  std::vector<std::vector<SharedBundle>> shared(transports_.size());
  layouts_.reserve(bundles_.size());
  wholes_.resize(bundles_.size());
  steps_.resize(bundles_.size());
  for (BundleId b = 0; b < static_cast<BundleId>(bundles_.size()); ++b) {
    const Bundle& bundle = bundles_[b];
    const bool has_group = bundle.group >= 0 && bundle.group < static_cast<int>(transports_.size());
    const BundleLayout& layout = layouts_.emplace_back(
        bundle, weights_, has_group ? transports_[bundle.group] : nullptr, options_.wire);
    specs_.push_back(layout.spec());
    MOIETY_CHECK(sink_ || !layout.trained(), "gtp executor: bundle {} is trained without a sink",
                 bundle.name);
    if (layout.ranks() > 1) {
      shared[bundle.group].push_back(layout.shared(b));
    } else {
      make_whole(b);
    }
  }
  for (size_t g = 0; g < transports_.size(); ++g) {
    if (transports_[g]) transports_[g]->share(std::move(shared[g]));
  }
  reserve();
}

Executor::Impl::~Impl() {
  try {
    for (const Event& e : debris_) e.wait();
    flushed_.wait();
    for (const auto& lane : lanes_) lane->stream.synchronize();
  } catch (const std::exception& e) {
    log(LogLevel::kError, "gtp executor: what was in flight at its end failed: {}", e.what());
  }
}

void Executor::Impl::check_weights() const {
  std::vector<int32_t> owner(weights_.size(), kNoBundle);
  for (size_t b = 0; b < bundles_.size(); ++b) {
    for (const WeightId w : bundles_[b].members) {
      // BundleLayout reports these
      if (w < 0 || w >= static_cast<WeightId>(weights_.size())) continue;
      MOIETY_CHECK(owner[w] == kNoBundle, "gtp executor: weight {} is in bundles {} and {}",
                   weights_[w].name, bundles_[owner[w]].name, bundles_[b].name);
      owner[w] = static_cast<int32_t>(b);
    }
  }
  for (size_t w = 0; w < weights_.size(); ++w) {
    check_weight(weights_[w]);
    MOIETY_CHECK(owner[w] != kNoBundle, "gtp executor: weight {} is in no bundle",
                 weights_[w].name);
  }
}

// Takes memory for a step on demand: the largest gather, and a send slot of every size, so that a
// rank that has left its plan alone can plan anew without its peers.
void Executor::Impl::reserve() {
  int64_t slot = 0, scratch = 0;
  std::set<SlotSpec> sends;
  for (const BundleSpec& s : specs_) {
    if (s.group_size == 1) continue;
    for (const BundleSpec::Transfer& t : s.gather) {
      slot = std::max(slot, t.slot);
      scratch = std::max(scratch, t.scratch);
    }
    for (const int64_t bytes : {s.reduce.slot, s.rows.reduce.slot}) {
      if (bytes > 0) sends.insert({SlotUse::kSend, s.group, false, false, bytes});
    }
  }
  if (slot > 0) arena_.demand({}, slot + scratch);
  arena_.place(std::vector<SlotSpec>(sends.begin(), sends.end()));
}

SlotArena::Block Executor::Impl::allocate(Space space, int64_t bytes) {
  if (space.send) {
    if (alone_) throw NoRoom{};
    return transports_[space.group]->allocate("send slots", bytes);
  }
  auto memory = options_.device.type == DeviceType::kCpu
                    ? std::make_shared<Buffer>(bytes, "gtp slots", 256)
                    : std::make_shared<Buffer>(bytes, options_.device, "gtp slots");
  return {memory->view(DType::kUInt8, {bytes}), memory};
}

void Executor::Impl::make_whole(BundleId b) {
  Whole& out = wholes_[b];
  const BundleLayout& layout = layouts_[b];
  out.view = out.columns = layout.whole(out.quantized);
  if (!layout.derives_columns()) return;
  std::vector<QuantizedView> all;
  std::vector<quant::QuantizeItem> items;
  for (const WeightId w : bundles_[b].members) {
    QuantizedView view = weights_[w].quantized;
    const ArraySpec columns =
        quantized_sizes(view.spec, view.rows, view.cols, {true, true}).col_data;
    const Buffer& memory =
        out.memory.emplace_back(options_.device.type == DeviceType::kCpu
                                    ? Buffer(columns.bytes(), "gtp columns")
                                    : Buffer(columns.bytes(), options_.device, "gtp columns"));
    view.col_data = memory.view(columns.dtype, {columns.sizes[0], columns.sizes[1]});
    items.push_back({{}, view, {}});
    out.with_columns.push_back(first_rows(view, layout.rows()));
  }
  out.transposes = std::make_unique<quant::QuantizeTable>(items);
  out.columns.quantized = out.with_columns;
}

// ---- begin and end of a step

int64_t Executor::Impl::begin(const StepKey& key, const Stream& stream) {
  const Call call(*this);
  MOIETY_CHECK(!in_step_, "gtp executor: step {} {} begins before the flush of {} {}", key.kind,
               key.batches, name_->kind, name_->batches);
  if (abandoned_ && sink_) sink_->on_step_abandoned();
  abandoned_ = false;
  for (const Event& e : debris_) stream.wait(e);
  debris_.clear();
  const auto found = keys_.try_emplace(key).first;
  name_ = &found->first;
  key_ = &found->second;
  plan_ = key_->plan.get();
  for (BundleStep& b : steps_) b.reset();
  streams_.assign(1, stream);
  joined_.clear();
  rows_read_.clear();
  pieces_.clear();
  kept_.clear();
  reading_ = false;
  at_ = segment_ = 0;
  counts_.step = {};
  in_step_ = true;
  return ++step_;
}

void Executor::Impl::enter_step(const Stream& stream) {
  const Call call(*this);
  begun_.record(stream);
  for (const auto& lane : lanes_) {
    lane->stream.wait(begun_);
    lane->segment = 0;
    lane->scratch = {};
    // In an abandoned step peers may still read the send slots that this one writes.
    if (lane->used && lane->reduces) {
      transports_[lane->group]->await_readers(lane->expert, lane->stream);
      lane->edge.record(lane->stream);
      stream.wait(lane->edge);
    }
    lane->used = false;
  }
  if (planned()) {
    begin_planned(stream);
  } else if (!key_->on_demand) {
    recorder_.begin();
  }
}

void Executor::Impl::flush(const Stream& stream) {
  const Call call(*this);
  if (!in_step_) {
    MOIETY_CHECK(counts_.steps > 0, "gtp executor: flush before a step");
    return;
  }
  for (size_t b = 0; b < steps_.size(); ++b) {
    MOIETY_CHECK(!steps_[b].open,
                 "gtp executor: flush at position {}, but the grad_buffer of bundle {} at position "
                 "{} was not reduced",
                 at_ + 1, bundles_[b].name, steps_[b].opened_at);
  }
  // Nothing is gathered any more. The reader's stream may have been joined by this one already.
  reading_ = false;
  ++at_;
  if (planned() && at_ != plan_->plan.positions - 1) depart();
  see(stream);
  const bool followed = planned();
  join_lanes(stream);
  if (!followed) report_rest(stream);
  if (options_.compare_scales > 0 && counts_.steps % options_.compare_scales == 0) {
    compare_tensor_values(stream);
  }
  flushed_.record(stream);
  close_step();
  ++counts_.steps;
  counts_.step.planned = followed;
  if (followed) {
    key_->replaced = 0;
    ++counts_.planned;
  } else if (!key_->on_demand) {
    seal();
  }
  counts_.arena_bytes = arena_.bytes();
}

// Joins the lanes: E7, and E6 for the next step.
void Executor::Impl::join_lanes(const Stream& stream) {
  for (int g = 0; g < static_cast<int>(transports_.size()); ++g) {
    if (!transports_[g]) continue;
    ExecutorLane* last = nullptr;  // the last lane of gathers
    for (const auto& lane : lanes_) {
      if (lane->group != g || !lane->used) continue;
      if (lane->reduces) {
        transports_[g]->await_readers(lane->expert, lane->stream);
      } else if (last) {
        lane->edge.record(lane->stream);
        last->stream.wait(lane->edge);
      } else {
        last = lane.get();
      }
    }
    const Stream& end = last ? last->stream : stream;
    rows_read_.wait(end);
    transports_[g]->drain(end);
  }
  for (const auto& lane : lanes_) {
    if (!lane->used) continue;
    lane->edge.record(lane->stream);
    stream.wait(lane->edge);
    lane->used = false;
  }
}

void Executor::Impl::close_step() {
  in_step_ = reading_ = false;
  plan_ = nullptr;
}

void Executor::Impl::abandon(int64_t step) noexcept {
  if (!in_step_ || step != step_) return;
  try {
    for (const auto& lane : lanes_) debris_.emplace_back().record(lane->stream);
    for (const Stream& s : streams_) debris_.emplace_back().record(s);
  } catch (const std::exception& e) {
    log(LogLevel::kError, "gtp executor: step {} {} was abandoned: {}", name_->kind, name_->batches,
        e.what());
  }
  abandoned_ = true;
  close_step();
  ++counts_.abandoned;
}

// ---- calls

Executor::Impl::Call::Call(Impl& impl) : impl_(impl) {
  MOIETY_CHECK(!impl.busy_.exchange(true), "gtp executor: calls overlap");
}

const BundleLayout& Executor::Impl::checked(const char* call, BundleId b) const {
  MOIETY_CHECK(in_step_, "gtp executor: {} of bundle {} outside of a step", call, b);
  MOIETY_CHECK(b >= 0 && b < static_cast<BundleId>(layouts_.size()),
               "gtp executor: {} of bundle {} at position {}, of {} bundles", call, b, at_ + 1,
               layouts_.size());
  return layouts_[b];
}

// The first work of every call between begin and flush; it ends the views of the call before.
void Executor::Impl::enter(Kind kind, std::span<const BundleId> bundles, Work work) {
  end_reads();
  ++at_;
  if (planned() && !as_planned(kind, bundles)) depart();
  if (!planned() && !key_->on_demand) recorder_.call(kind, bundles, work);
}

// Records E3: all readers of the latest call have been enqueued.
void Executor::Impl::end_reads() {
  if (!reading_) return;
  reading_ = false;
  if (reading_planned_) {
    end_planned_reads(at_, reader_);
  } else if (!pieces_.empty()) {
    for (const SlotArena::Slot& piece : pieces_) poison(piece.memory, reader_);
    read_.record(reader_);
  }
}

void Executor::Impl::see(const Stream& stream) {
  const auto is_it = [&](const Stream& s) { return same(s, stream); };
  if (std::any_of(streams_.begin(), streams_.end(), is_it)) return;
  streams_.push_back(stream);
  for (const Event& e : joined_) stream.wait(e);
}

void Executor::Impl::publish(BundleId b, const Stream& stream) {
  BundleStep& state = steps_[b];
  if (!state.published) {
    source_.ensure_ready(b, stream);
    state.published = true;
    state.published_on = stream;
    state.ready.record(stream);
  } else if (!same(state.published_on, stream)) {
    stream.wait(state.ready);
  }
}

View Executor::Impl::whole(BundleId b, Phase phase, const Stream& stream) {
  publish(b, stream);
  const Whole& whole = wholes_[b];
  if (phase != Phase::kBwd || specs_[b].rows_only) return whole.view;
  BundleStep& state = steps_[b];
  if (whole.transposes && !state.derived) {
    quant::transpose_quantized(*whole.transposes, stream);
    state.derived = true;
    state.derived_on = stream;
    state.columns.record(stream);
  } else if (whole.transposes && !same(state.derived_on, stream)) {
    stream.wait(state.columns);
  }
  return whole.columns;
}

void Executor::Impl::materialize(std::span<const BundleId> bundles, Phase phase, Work work,
                                 std::span<View> views, const Stream& stream) {
  const Call call(*this);
  MOIETY_CHECK(!bundles.empty() && views.size() == bundles.size(),
               "gtp executor: materialize of {} bundles into {} views", bundles.size(),
               views.size());
  for (size_t i = 0; i < bundles.size(); ++i) {
    checked("materialize", bundles[i]);
    MOIETY_CHECK(std::find(bundles.begin(), bundles.begin() + static_cast<std::ptrdiff_t>(i),
                           bundles[i]) == bundles.begin() + static_cast<std::ptrdiff_t>(i),
                 "gtp executor: materialize names bundle {} twice at position {}",
                 bundles_[bundles[i]].name, at_ + 1);
  }
  enter(kind_of(phase), bundles, work);
  see(stream);
  reading_ = true;
  reading_planned_ = planned();
  reader_ = stream;
  if (planned()) {
    consume_planned(bundles, phase, views, stream);
    issue(at_);
  } else {
    consume_on_demand(bundles, phase, views, stream);
  }
}

// Begins a contribution, whose memory belongs to the writer from here on.
BundleStep& Executor::Impl::open_gradient(const char* call, BundleId b, Kind kind, Work work,
                                          const Stream& stream) {
  const BundleLayout& layout = checked(call, b);
  BundleStep& state = steps_[b];
  MOIETY_CHECK(layout.trained(), "gtp executor: {} of bundle {}, which is not trained", call,
               bundles_[b].name);
  MOIETY_CHECK(!state.open,
               "gtp executor: {} of bundle {} at position {}, that of position {} was not "
               "reduced",
               call, bundles_[b].name, at_ + 1, state.opened_at);
  const BundleId ids[] = {b};
  enter(kind, ids, work);
  see(stream);
  state.by_rows = kind == Kind::kRowsGrad;
  // A bundle that was consumed before is ready on every stream that may be the writer's.
  if (!state.published || !planned()) publish(b, stream);
  planned() ? open_planned(b, stream) : open_on_demand(b, stream);
  return state;
}

View Executor::Impl::grad_buffer(BundleId b, const Stream& stream) {
  const Call call(*this);
  BundleStep& state = open_gradient("grad_buffer", b, Kind::kGradBuffer, {}, stream);
  const BundleLayout& layout = layouts_[b];
  View view;
  if (layout.ranks() == 1) {
    if (state.reported) withdraw(b, stream);
    view.data = layout.grad_rows();
    view.accumulate = state.added > 0;
  } else {
    poison(state.send.memory, stream);
    view.data = layout.send_rows(state.send.memory);
  }
  state.open = true;
  state.opened_at = at_;
  if (planned()) issue(at_);
  return view;
}

void Executor::Impl::reduce(BundleId b, const Stream& stream) {
  const Call call(*this);
  checked("reduce", b);
  BundleStep& state = steps_[b];
  MOIETY_CHECK(state.open, "gtp executor: reduce of bundle {} at position {} without a grad_buffer",
               bundles_[b].name, at_ + 1);
  const BundleId ids[] = {b};
  enter(Kind::kGrad, ids, {});
  see(stream);
  end_gradient(b, stream);
}

void Executor::Impl::end_gradient(BundleId b, const Stream& stream) {
  BundleStep& state = steps_[b];
  state.open = false;
  const bool first = state.added++ == 0;
  if (planned()) {
    reduce_planned(b, first, stream);
    issue(at_);
  } else {
    reduce_on_demand(b, first, stream);
  }
}

void Executor::Impl::note_work(Work work) {
  const Call call(*this);
  MOIETY_CHECK(in_step_, "gtp executor: note_work outside of a step");
  if (!planned() && !key_->on_demand) recorder_.note_work(work);
}

void Executor::Impl::cut() {
  const Call call(*this);
  MOIETY_CHECK(in_step_, "gtp executor: cut outside of a step");
  enter(Kind::kCut, {}, {});
  for (const auto& lane : lanes_) {
    if (lane->used && lane->segment == segment_) lane->tail.record(lane->stream);
  }
  ++segment_;
  if (planned()) issue(at_);
}

// ---- lanes

size_t Executor::Impl::lane_of(int group, bool expert, bool reduces) {
  for (size_t l = 0; l < lanes_.size(); ++l) {
    const ExecutorLane& lane = *lanes_[l];
    if (lane.group == group && lane.expert == expert && lane.reduces == reduces) return l;
  }
  ExecutorLane& lane = *lanes_.emplace_back(std::make_unique<ExecutorLane>());
  lane.group = group;
  lane.expert = expert;
  lane.reduces = reduces;
  lane.stream = options_.make_lane ? options_.make_lane() : Stream::on(options_.device);
  if (in_step_) lane.stream.wait(begun_);
  for (const Event& e : joined_) lane.stream.wait(e);
  return lanes_.size() - 1;
}

// The lane for an operation, which comes behind the lane's operations in the graph segment before.
ExecutorLane& Executor::Impl::use(size_t l) {
  ExecutorLane& lane = *lanes_[l];
  if (lane.segment != segment_) lane.stream.wait(lane.tail);
  lane.segment = segment_;
  lane.used = true;
  return lane;
}

void Executor::Impl::gather(BundleId b, const Landed& landed, ExecutorLane& lane) {
  publish(b, lane.stream);
  transports_[lane.group]->gather({b, &landed.landing}, lane.stream);
  landed.landing.finish(lane.stream);
  StepCounts::Moved& count = moved(b);
  ++count.gathers;
  count.gathered += landed.landing.layout().received();
}

// Sends a gradient: E4 and the operations behind it.
void Executor::Impl::send(BundleId b, bool first, TensorView scratch, ExecutorLane& lane,
                          const Stream& stream) {
  lane.edge.record(stream);
  lane.stream.wait(lane.edge);
  if (steps_[b].reported) withdraw(b, lane.stream);
  const BundleLayout& layout = layouts_[b];
  if (steps_[b].by_rows) {
    send_rows(b, first, scratch, lane);
  } else {
    transports_[lane.group]->reduce({b, layout.send(steps_[b].send.memory), scratch,
                                     layout.main_grads(), layout.valid_rows(), first},
                                    lane.stream);
  }
  StepCounts::Moved& count = moved(b);
  ++count.reduces;
  count.reduced += reduce_of(b).received;
}

void Executor::Impl::report(BundleId b, const Event& event) {
  for (const WeightId w : bundles_[b].members) sink_->on_grad_ready(w, event);
  steps_[b].reported = true;
}

void Executor::Impl::withdraw(BundleId b, const Stream& stream) {
  for (const WeightId w : bundles_[b].members) sink_->on_grad_late(w, stream);
  steps_[b].reported = false;
}

void Executor::Impl::zero_gradients(BundleId b, const Stream& stream) {
  publish(b, stream);
  for (const TensorView& g : layouts_[b].main_grads()) fill_bytes(g, 0, stream);
}

StepCounts::Moved& Executor::Impl::moved(BundleId b) {
  return specs_[b].expert ? counts_.step.expert : counts_.step.dense;
}

void Executor::Impl::poison(const TensorView& memory, const Stream& stream) const {
  if (options_.poison) fill_bytes(memory, 0xFF, stream);
}

const BundleSpec& Executor::Impl::spec(BundleId b) const {
  MOIETY_CHECK(b >= 0 && b < static_cast<BundleId>(specs_.size()), "gtp executor: bundle {} of {}",
               b, specs_.size());
  return specs_[b];
}

const StepPlan* Executor::Impl::step_plan(const StepKey& key) const {
  const auto found = keys_.find(key);
  return found == keys_.end() ? nullptr : found->second.plan.get();
}

// ---- the class itself

Executor::Executor(std::vector<ShardedWeight> weights, std::vector<Bundle> bundles,
                   std::vector<Transport*> transports, const ExecutorOptions& options,
                   comm::Bootstrap* ranks, ParamSource& source, GradSink* sink)
    : impl_(std::make_unique<Impl>(std::move(weights), std::move(bundles), std::move(transports),
                                   options, ranks, source, sink)) {}
Executor::~Executor() = default;

StepScope Executor::begin_step(const StepKey& key, const Stream& stream) {
  StepScope scope(this, impl_->begin(key, stream));
  impl_->enter_step(stream);
  return scope;
}

void Executor::materialize(std::span<const BundleId> bundles, Phase phase, Work work,
                           std::span<View> views, const Stream& stream) {
  impl_->materialize(bundles, phase, work, views, stream);
}

View Executor::materialize(BundleId bundle, Phase phase, Work work, const Stream& stream) {
  View view;
  impl_->materialize({&bundle, 1}, phase, work, {&view, 1}, stream);
  return view;
}

View Executor::grad_buffer(BundleId bundle, const Stream& stream) {
  return impl_->grad_buffer(bundle, stream);
}
void Executor::reduce(BundleId bundle, const Stream& stream) { impl_->reduce(bundle, stream); }
void Executor::look_up(BundleId bundle, TensorView token_T, TensorView out_TD, TensorView faults,
                       Work work, const Stream& stream) {
  impl_->look_up(bundle, token_T, out_TD, faults, work, stream);
}
void Executor::add_rows(BundleId bundle, TensorView token_T, TensorView dout_TD, Work work,
                        const Stream& stream) {
  impl_->add_rows(bundle, token_T, dout_TD, work, stream);
}
void Executor::note_work(Work work) { impl_->note_work(work); }
void Executor::cut() { impl_->cut(); }
void Executor::flush(const Stream& stream) { impl_->flush(stream); }
void Executor::abandon(int64_t step) noexcept { impl_->abandon(step); }
const ExecutorCounts& Executor::counts() const { return impl_->counts(); }
const BundleSpec& Executor::bundle(BundleId bundle) const { return impl_->spec(bundle); }
const Plan* Executor::plan_of(const StepKey& key) const {
  const StepPlan* plan = impl_->step_plan(key);
  return plan ? &plan->plan : nullptr;
}
std::span<const TraceEvent> Executor::trace_of(const StepKey& key) const {
  const StepPlan* plan = impl_->step_plan(key);
  return plan ? std::span<const TraceEvent>(plan->trace) : std::span<const TraceEvent>();
}

StepScope::~StepScope() {
  if (executor_) executor_->abandon(step_);
}

}  // namespace moiety::gtp
