// The operations of PeerExchange as lists of steps, whatever runs them. A Machine is that:
//   SymmetricBuffer share(comm, name, bytes)   memory of all ranks
//   shared_ptr<Buffer> own(bytes)   memory of this rank, zero
//   write(to, from, bytes), read(to, from, bytes)   copies to and from that memory, at once
//   FaultPage* page()                          host memory that steps reach, zero
//   int64_t blocks()                           the most blocks that it is worth to have in a grid
//   int multiprocessors()                      how many blocks of one kernel can wait side by side
//   launch(name, step, LaunchSize, stream)     runs a step behind those before it on the stream
//   end(stream, bootstrap)                     stands behind each operation
//   wait(stream, bootstrap)                    waits for them; an abort is told on the page
//   captured(stream)                           whether the stream is captured into a graph
//   ready(comm)                                ends the creation of memory
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <type_traits>

#include "moiety/base/error.h"
#include "moiety/comm/agree.h"
#include "moiety/comm/flags.h"
#include "moiety/formats/bf16.h"
#include "moiety/formats/fp16.h"
#include "moiety/moe/peers/carry_steps.h"
#include "moiety/moe/peers/peer_exchange.h"
#include "moiety/moe/peers/step_views.h"
#include "moiety/moe/prepare_dispatch.h"

namespace moiety::moe::peers {

// The blocks of a step's grid, each of Step::kThreads threads, and the memory of each.
struct LaunchSize {
  int64_t blocks = 1, shared_bytes = 0;
};

// Writes the findings' report, which then starts again from zero.
struct TakeReport {
  static constexpr int kThreads = 32;
  Control* control;
  int64_t* out;
  int64_t stride;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    team.each(3, [&](int64_t i) {
      out[i * stride] = control->findings.report[i];
      control->findings.report[i] = 0;
    });
  }
};

// The sentence of a fault.
std::string fault_text(const std::string& group, double deadline, const Fault& fault, int rank,
                       const std::string& abort);

// Calls f(a value of T) for the type of floating-point rows.
template <class F>
void with_row_type(DType dtype, F&& f) {
  if (dtype == DType::kBFloat16) return f(bf16{});
  if (dtype == DType::kFloat16) return f(fp16{});
  f(float{});
}

template <class Machine>
class StepExchange final : public PeerExchange {
 public:
  StepExchange(Machine machine, comm::Communicator& comm, const ExpertMap& map,
               const EpOptions& options)
      : comm_(&comm), map_(map), options_(options), machine_(std::move(machine)) {
    make_control();
  }

  void allocate(const EpLimits& limits) override {
    takes_early_ = limits.tokens <= kFewTokens && limits.depth > 1 && !over_collectives();
    check_waiting();
    // One operation's boxes come when the one before has ended.
    const int depth = over_collectives() ? 1 : limits.depth;
    const MappedLayout layout = over_collectives() ? carried_layout(map_, limits, options_)
                                                   : mapped_layout(map_, limits, options_);
    const EpBytes bytes = peer_bytes(map_, limits, options_);
    comm::SymmetricBuffer fresh = make_memory(options_.name, bytes.total);
    Control c = control();
    c.open = 1;
    c.depth = depth;
    c.rows_max = moe::rows_max(limits);
    c.layout = layout;
    for (int r = 0; r < comm_->size(); ++r) c.base_R[r] = fresh.peer(r);
    if (over_collectives()) {
      places_ = carry_places(map_, limits, options_);
      for (int r = 0; r < comm_->size(); ++r) {
        if (r != c.rank) c.base_R[r] = fresh.local() + places_.nowhere;
      }
      c.boxes = fresh.local() + places_.boxes;
    }
    const std::vector<uint64_t> credits(comm_->size(), static_cast<uint64_t>(c.epoch));
    machine_.write(fresh.local() + layout.credit, credits.data(), 8 * comm_->size());
    set_control(c);
    std::swap(memory_, fresh);
    layout_ = layout;
    rows_max_ = c.rows_max;
    bytes_ = bytes;
    machine_.ready(*comm_);
    if (fresh) fresh.close();
    machine_.ready(*comm_);
  }

  void release() override {
    if (!memory_) return;
    Control c = control();
    c.open = 0;
    set_control(c);
    memory_.close();
    layout_ = {};
    bytes_ = {};
  }

  const EpBytes& bytes() const override { return bytes_; }
  void wait(const Stream& stream) override { machine_.wait(stream, comm_->bootstrap()); }
  bool captured(const Stream& stream) const override { return machine_.captured(stream); }
  void end_waits() override { comm::store_release(machine_.page()->abort, 1); }

  std::string failure() const override {
    FaultPage* page = machine_.page();
    if (comm::load_acquire(page->found) == 0) return {};
    return fault_text(options_.name, options_.deadline.count(), page->fault, comm_->rank(),
                      comm_->bootstrap().aborted().value_or(""));
  }

  int64_t* waited_ns() const override {
    return reinterpret_cast<int64_t*>(control_.local() + offsetof(Control, waited_ns));
  }

  void set_apart(const Stream& stream) override {
    launch("ep set apart", SetApart{here()}, {}, stream);
  }
  void join(const Stream& beside) override { launch("ep join", Join{here()}, {}, beside); }

  const uint64_t* fault_word() const override {
    static_assert(offsetof(Control, failed) % 8 == 0 &&
                  offsetof(Control, told) == offsetof(Control, failed) + 4);
    return reinterpret_cast<const uint64_t*>(control_.local() + offsetof(Control, failed));
  }

  std::optional<Finding> take_finding(Epoch epoch) override {
    Findings findings;
    std::byte* const there = control_.local() + offsetof(Control, findings);
    machine_.read(&findings, there, sizeof(findings));
    const std::optional<Finding> first = findings.take(epoch);
    if (first) machine_.write(there, &findings, sizeof(findings));
    return first;
  }
  void take_report(const TensorView& report, const Stream& stream) override {
    launch("ep take_report", TakeReport{here(), report.data<int64_t>(), report.stride(0)}, {},
           stream);
  }

  uint64_t last_rows_ns() const override { return control().rows_ns; }

  void prepare(const EpPlan& plan, const PrepareArgs& args, Epoch epoch,
               const Stream& stream) override {
    const PrepareView p = view_of(plan, args, epoch);
    Control* const c = here();
    enter({.op = OpKind::kPrepare}, stream);
    count(plan, p, stream);
    if (over_collectives()) {
      launch("ep prepare, heads", ExchangeHeads{c, p, true, false}, {}, stream);
      carry(layout_.meta, layout_.message, stream);
    }
    launch("ep prepare, settle", SettlePlan{{c, p, !over_collectives(), true}},
           {1, trim_bytes(map_.experts())}, stream);
    launch("ep prepare, slots", Last<FindSlots>{{c, p}, c},
           {grid(plan.tokens_max, FindSlots::tile(FindSlots::kThreads, plan.topk))}, stream);
    end(stream);
  }

  bool takes_early() const override { return takes_early_; }
  void prepare_copy_rows(const EpPlan& plan, const PrepareArgs& args, Epoch epoch,
                         const DispatchRows& d, const Stream& stream) override {
    const PrepareView p = view_of(plan, args, epoch);
    const CopyRows rows = view_of(d.x, d.w_TK, d.rows, plan.topk, d.zero_tail);
    Control* const c = here();
    const auto lead = [&]<bool many>() {
      using Step = Early<many>;
      const Signature first{.op = OpKind::kPrepare, .early = true};
      launch("ep early",
             Step{c, static_cast<uint32_t>(first.bits()), static_cast<uint32_t>(d.signature.bits()),
                  d.signature.row_bytes, d.signature.plan, p, rows},
             {Step::kBlocks, Step::shared_bytes(plan.topk, map_.experts(), map_.ranks())}, stream);
    };
    few_experts() ? lead.template operator()<false>() : lead.template operator()<true>();
    const int64_t items = map_.ranks() * plan.tokens_max * rows.pieces();
    launch("ep take early", Last<ExpandRows>{{c, p.plan, rows, {}, true}, c},
           {take_grid(plan, items)}, stream);
    end(stream);
    zero_places(plan, rows, d.rows.places, stream);
  }

  void copy_rows(const EpPlan& plan, const DispatchRows& d, const Stream& stream) override {
    const CopyRows rows = view_of(d.x, d.w_TK, d.rows, plan.topk, d.zero_tail);
    enter(d.signature, stream, d.rows.operand(plan.capacity));
    move_rows(plan, ExpandRows{here(), view_of(plan), rows, {}}, rows.pieces(),
              may_be_direct(d.signature), stream);
    zero_places(plan, rows, d.rows.places, stream);
  }

  void scale_rows(const EpPlan& plan, const ScaledRows& a, const Signature& signature,
                  const Stream& stream) override {
    const CopyRows rows = view_of(a.g, {}, a.gy, plan.topk, false);
    const Rows slot_w(a.slot_w), y(a.y_CD);
    with_row_type(a.dtype, [&]<class T>(T) {
      const ScaleRows<T> step{.control = here(),
                              .plan = view_of(plan),
                              .rows = rows,
                              .slot_w = slot_w[0],
                              .y = y[0],
                              .w_stride = slot_w.stride(),
                              .y_stride = y.stride(),
                              .model = a.g.model,
                              .wide = wide_rows(a),
                              .dots = a.y_CD.defined(),
                              .taken = {}};
      enter(signature, stream);
      move_rows(plan, step, plan.topk, may_be_direct(signature), stream);
    });
  }

  void sum_rows(const EpPlan& plan, const SumArgs& sum, const Signature& signature,
                const Stream& stream) override {
    const SumRows rows = view_of(sum, plan.topk);
    const PlanView view = view_of(plan);
    const OwnRows own = enter(signature, stream, operand_of(sum));
    // The own parts wait in `out`, if nothing that is added later lies there, and if its elements are
    // those that travel: wider ones would be written and read for longer than they save.
    const bool like_wire = sum.y_CD.dtype() == DType::kFloat32 || rows.out_fp32 == rows.wire_fp32;
    const bool ahead = plan.tokens_max > kFewTokens && !rows.by_token && like_wire &&
                       !overlap(sum.addend, sum.out_TD);
    const auto take = [&]<class Step>(const Step& step) {
      const int64_t items = plan.tokens * rows.pieces();
      launch("ep take sums", Last<Step>{step, here()},
             {std::min(most_blocks<Step>(), grid(items, kRowsOfBlock))}, stream);
    };
    const auto take_as = [&]<class T, class Out>(T, Out) {
      const HomeSums<T, Out> home{here(), view, rows};
      ahead ? take(AddParts<T, Out>{home}) : take(TakeSums<T, Out>{home});
    };
    with_row_type(sum.y_CD.dtype(), [&]<class T>(T) {
      const int64_t pushing =
          std::max(push_grid(plan), ahead ? grid(plan.tokens, options_.chunk_rows) : 1);
      store_and_await("ep push sums", PushSums<T>{here(), view, rows, ahead}, {pushing},
                      rows.by_token ? plan.topk * rows.record : rows.record,
                      Await{here(), view, true}, may_be_direct(signature), stream);
      rows.out_fp32 ? take_as(T(), float()) : take_as(T(), T());
    });
    if (own.direct()) launch("ep await readers", AwaitReaders{here()}, {}, stream);
    end(stream);
  }

  void attach(const comm::SymmetricBuffer& buffer) override {
    const auto free = std::find_if(attached_.begin(), attached_.end(),
                                   [](const comm::SymmetricBuffer& b) { return !b; });
    MOIETY_CHECK(free != attached_.end(), "ep attach, group \"{}\": {} buffers are attached",
                 options_.name, kMostAttached);
    *free = buffer;
    Control c = control();
    for (int r = 0; r < comm_->size(); ++r)
      c.attached[free - attached_.begin()][r] = buffer.peer(r);
    set_control(c);
  }
  bool detach(const comm::SymmetricBuffer& buffer) override {
    for (comm::SymmetricBuffer& b : attached_) {
      if (!b || !buffer || b.local() != buffer.local()) continue;
      b = {};
      return true;
    }
    return false;
  }
  bool reaches(const Operand& operand) const override { return find(operand).direct(); }

  const MappedLayout& layout() const override { return layout_; }
  const comm::SymmetricBuffer& memory() const override { return memory_; }
  // For tests, which look into the memory.
  Control control() const {
    Control out;
    machine_.read(&out, control_.local(), sizeof(out));
    return out;
  }
  void set_control(const Control& c) { machine_.write(control_.local(), &c, sizeof(c)); }
  Machine& machine() { return machine_; }

 private:
  static constexpr int64_t kRowsOfBlock = 8;  // rows of a block of 8 warps, if all are there

  Control* here() const { return reinterpret_cast<Control*>(control_.local()); }
  // Blocks for so many items, of which one has some; a step takes what is left in turn.
  int64_t grid(int64_t items, int64_t of_block) const {
    return std::clamp<int64_t>(ceil_div(items, of_block), 1, machine_.blocks());
  }
  int64_t push_grid(const EpPlan& plan) const {
    return grid((map_.ranks() - 1) * plan.tokens_max, options_.chunk_rows);
  }
  // The most blocks of a step: what a multiprocessor has room for on each, if the step says it.
  template <class Step>
  int64_t most_blocks() const {
    if constexpr (requires { Step::kResident; }) {
      return std::max<int64_t>(1, machine_.blocks() * Step::kResident / 4);
    } else {
      return machine_.blocks();
    }
  }
  // Of `all` blocks at most half push.
  int64_t most_pushers(int64_t all) const {
    constexpr int64_t kDefault = 24;  // multiprocessors
    const int64_t of_multiprocessor = ceil_div(4 * all, machine_.blocks());
    const int64_t asked = options_.comm_sms > 0 ? options_.comm_sms : kDefault;
    return std::min(of_multiprocessor * asked, all / 2);
  }
  bool few_experts() const { return map_.experts() <= NumberPairs<false>::kMostExperts; }
  // Numbers own rows and pairs, with their counts.
  void count(const EpPlan& plan, const PrepareView& p, const Stream& stream) {
    few_experts() ? count<false>(plan, p, stream) : count<true>(plan, p, stream);
  }
  template <bool many>
  void count(const EpPlan& plan, const PrepareView& p, const Stream& stream) {
    using Number = NumberPairs<many>;
    Control* const c = here();
    const int64_t experts = map_.experts(), tokens = grid(plan.tokens, kTokenBlock);
    const NumberPlaces places(plan.topk, experts, Number::kThreads / 32);
    const bool alone = plan.tokens <= kTokenBlock;
    if (!alone) {
      const int64_t slots = grid(std::max(plan.tokens, plan.capacity), kTokenBlock);
      const int64_t counters = ceil_div(map_.ranks() + experts, kRowsOfBlock);
      launch("ep prepare, rows", CountRows{c, p}, {slots, shared_counts(experts)}, stream);
      if (p.may_cut()) {
        launch("ep prepare, add rows", AddBlocks{c, p, true, false}, {counters}, stream);
        launch("ep prepare, pairs", CountPairs{c, p}, {tokens, shared_counts(experts)}, stream);
      }
      launch("ep prepare, add", AddBlocks{c, p, !p.may_cut(), true}, {counters}, stream);
    }
    launch("ep prepare, number", Number{c, p, alone}, {tokens, places.bytes}, stream);
  }

  template <class Step>
  void launch(const char* name, const Step& step, const LaunchSize& size, const Stream& stream) {
    if (options_.before_store) options_.before_store();
    machine_.launch(name, step, size, stream);
  }
  // Returns where the operand lies for peers, if they reach it in this operation.
  OwnRows enter(const Signature& s, const Stream& stream, const Operand& operand = {}) {
    const bool direct = may_be_direct(s);
    const OwnRows own = direct ? find(operand) : OwnRows();
    launch(
        "ep enter",
        Enter{here(), static_cast<uint32_t>(s.bits()), s.row_bytes, s.plan, own, direct, s.pulls()},
        {}, stream);
    return s.pulls() ? own : OwnRows();
  }
  bool may_be_direct(const Signature& s) const {
    return options_.zero_copy == ZeroCopy::kAuto && !over_collectives() && s.may_be_direct();
  }
  OwnRows find(const Operand& operand) const {
    const int64_t bytes = (operand.rows - 1) * operand.stride + operand.bytes;
    for (size_t i = 0; i < attached_.size() && operand.rows > 0; ++i) {
      if (!attached_[i] || !attached_[i].contains(operand.base, bytes)) continue;
      const auto offset = static_cast<uint64_t>(operand.base - attached_[i].local());
      return {uint64_t{i} << OwnRows::kOffsetBits | offset, operand.stride};
    }
    return {};
  }
  // Pushes rows while `step` takes the own ones, and lets it take the others when they have come. It
  // has `items` items of a warp for each row.
  template <class Step>
  void move_rows(const EpPlan& plan, Step step, int64_t items, bool told, const Stream& stream) {
    const PlanView view = view_of(plan);
    const int64_t all = most_blocks<Step>();
    const int64_t pushers =
        std::clamp<int64_t>(most_pushers(all), 1, std::max<int64_t>(1, push_grid(plan)));
    step.taken = {.own = true, .peers = false};
    store_and_await("ep push", PushBeside<Step>{{here(), view, step.rows}, step, pushers},
                    {pushers + std::min(take_grid(plan, plan.tokens * items),
                                        std::max<int64_t>(1, all - pushers)),
                     PushRows::shared_bytes(options_.chunk_rows)},
                    step.rows.staged.record, Await{here(), view, false}, told, stream);
    step.taken = {.own = false, .peers = true};
    launch("ep take", Last<Step>{step, here()},
           {std::min(all, take_grid(plan, (map_.ranks() - 1) * plan.tokens_max * items))}, stream);
    end(stream);
  }
  // Stores records of `stride` bytes for peers, by this step, and waits for theirs. `told`: whether
  // they have been told of the entry.
  template <class Step>
  void store_and_await(const char* name, const Step& step, const LaunchSize& size, int64_t stride,
                       const Await& await, bool told, const Stream& stream) {
    const bool carried = over_collectives();
    int64_t storing = size.blocks;
    if constexpr (requires { step.pushers; }) storing = step.pushers;
    launch(name, ThenAwait<Step>{step, await, told, !carried, storing}, size, stream);
    if (!carried) return;
    carry(layout_.regions, rows_max_ * stride, stream);
    launch("ep await", await, {}, stream);
  }
  // Blocks for a step that takes rows, in so many items of a warp, and zeroes slots.
  int64_t take_grid(const EpPlan& plan, int64_t items) const {
    return grid(std::max(items, plan.capacity / 32), kRowsOfBlock);
  }
  void zero_places(const EpPlan& plan, const CopyRows& rows, int64_t places, const Stream& stream) {
    if (!rows.source && rows.words.pads() == 0) return;
    launch("ep zero places", ZeroPlaces{here(), view_of(plan), rows, places},
           {grid(places, kTokenBlock)}, stream);
  }
  void end(const Stream& stream) { machine_.end(stream, comm_->bootstrap()); }

  // -- Over collectives.

  // Steps that wait have a block each, but for those of few tokens, and a group's come one after
  // another.
  void check_waiting() {
    waiting_.emplace(options_.device, text("group \"{}\"", options_.name),
                     takes_early_ ? Early<false>::kBlocks : 1);
    const std::string many = comm::too_many_waiting(*waiting_, machine_.multiprocessors());
    comm::agree(comm_->bootstrap(),
                many.empty() ? many
                             : text("ep, group \"{}\": {}; close some, or take more GPUs",
                                    options_.name, many),
                ErrorKind::kInvalidArgument);
  }
  bool over_collectives() const { return options_.transport == EpTransport::kCollectives; }
  // Memory of all ranks, or over collectives of this one, zero.
  comm::SymmetricBuffer make_memory(const std::string& name, int64_t bytes) {
    if (!over_collectives()) return machine_.share(*comm_, name, bytes);
    std::shared_ptr<Buffer> memory;
    comm::agree_on(comm_->bootstrap(), text("ep, group \"{}\"", options_.name),
                   text("allocate {}", bytes_text(bytes)), ErrorKind::kOutOfMemory,
                   [&] { memory = machine_.own(bytes); });
    return comm::SymmetricBuffer::adopt(
        *comm_, std::vector<std::byte*>(static_cast<size_t>(comm_->size()), memory->data()), bytes,
        memory, memory->device());
  }
  // Brings the boxes of `bytes` bytes to their peers, whose lie at `to` then; and their entries.
  void carry(int64_t to, int64_t bytes, const Stream& stream) {
    std::byte* const base = memory_.local();
    const int64_t ranks = map_.ranks(), me = comm_->rank();
    auto* const greetings = reinterpret_cast<Greeting*>(base + places_.greetings);
    const auto rows = [&](void* at, int64_t n, int64_t row) {
      return TensorView(at, DType::kUInt8, {n, row}, memory_.device());
    };
    launch("ep greet", Greet{here(), greetings}, {}, stream);
    comm_
        ->all_gather(rows(greetings + me, 1, sizeof(Greeting)),
                     rows(greetings, ranks, sizeof(Greeting)), stream)
        .wait();
    std::vector<int64_t> one_each(static_cast<size_t>(ranks), 1);
    one_each[static_cast<size_t>(me)] = 0;
    if (bytes > 0) {
      comm_
          ->all_to_all(rows(base + places_.boxes, ranks - 1, bytes), one_each,
                       rows(base + to, ranks - 1, bytes), one_each, stream)
          .wait();
    }
    launch("ep arrive", Arrive{here(), greetings, comm::fault_word(*comm_)}, {}, stream);
  }

  void make_control() {
    const int experts = map_.experts(), ranks = map_.ranks();
    const ControlPlaces at = control_places(experts, ranks);
    control_ = make_memory(text("{}, control", options_.name), at.bytes);
    std::byte* const base = control_.local();
    const auto ints = [&](int64_t place) { return reinterpret_cast<int32_t*>(base + place); };
    const auto words = [&](int64_t place) { return reinterpret_cast<int64_t*>(base + place); };
    Control c;
    c.rank = comm_->rank();
    c.ranks = ranks;
    c.experts = experts;
    c.map = {ints(at.owner), ints(at.local), ints(at.by_owner), ints(at.begin)};
    c.scratch = {.kept_E = ints(at.kept),
                 .offset_E = ints(at.offset),
                 .before_RE = ints(at.before),
                 .uncut_R = ints(at.uncut),
                 .largest_R = ints(at.largest),
                 .count_E = words(at.count),
                 .required_R = words(at.required),
                 .dropped_R = words(at.dropped),
                 .heads_R = reinterpret_cast<MessageHead*>(base + at.heads),
                 .trims = reinterpret_cast<Trims*>(base + at.trims)};
    c.page = machine_.page();
    c.deadline_ns = static_cast<uint64_t>(options_.deadline.count() * 1e9);
    c.chunk_rows = options_.chunk_rows;
    set_control(c);
    std::vector<int32_t> owner, local, by_owner, begin{0};
    for (int e = 0; e < experts; ++e) {
      owner.push_back(map_.owner(e));
      local.push_back(map_.local_index(e));
    }
    for (int r = 0; r < ranks; ++r) {
      for (const int32_t e : map_.experts_of(r)) by_owner.push_back(e);
      begin.push_back(static_cast<int32_t>(by_owner.size()));
    }
    machine_.write(base + at.owner, owner.data(), 4 * experts);
    machine_.write(base + at.local, local.data(), 4 * experts);
    machine_.write(base + at.by_owner, by_owner.data(), 4 * experts);
    machine_.write(base + at.begin, begin.data(), 4 * (ranks + 1));
  }

  comm::Communicator* comm_;
  const ExpertMap& map_;
  const EpOptions& options_;
  comm::SymmetricBuffer control_, memory_;
  std::array<comm::SymmetricBuffer, kMostAttached> attached_;
  MappedLayout layout_;
  EpBytes bytes_;
  CarryPlaces places_;
  int64_t rows_max_ = 0;
  bool takes_early_ = false;
  std::optional<comm::WaitingBlocks> waiting_;
  mutable Machine machine_;  // ends first: it may wait for steps that use the memory
};

}  // namespace moiety::moe::peers
