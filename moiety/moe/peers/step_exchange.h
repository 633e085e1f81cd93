// The operations of PeerExchange as lists of steps, whatever runs them. A Machine is that:
//   SymmetricBuffer share(comm, name, bytes)   memory of all ranks
//   write(to, from, bytes), read(to, from, bytes)   copies to and from that memory, at once
//   FaultPage* page()                          host memory that steps reach, zero
//   int64_t multiprocessors()                  how many blocks of 1024 threads run at a time
//   launch(name, step, LaunchSize, stream)     runs a step behind those before it on the stream
//   end(stream, bootstrap)                     stands behind each operation
//   wait(stream, bootstrap)                    waits for them; an abort is told on the page
//   ready(comm)                                ends the creation of memory
#pragma once

#include <algorithm>
#include <type_traits>

#include "moiety/base/error.h"
#include "moiety/comm/flags.h"
#include "moiety/formats/bf16.h"
#include "moiety/formats/fp16.h"
#include "moiety/moe/peers/number_steps.h"
#include "moiety/moe/peers/peer_exchange.h"
#include "moiety/moe/peers/step_views.h"

namespace moiety::moe::peers {

// The blocks of a step's grid, each of Step::kThreads threads, and the memory of each.
struct LaunchSize {
  int64_t blocks = 1, shared_bytes = 0;
};

// Writes the findings' report, which then starts again from zero.
struct TakeReport {
  static constexpr int kThreads = 32, kBlocks = 1;
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
    MappedLayout layout = mapped_layout(map_, limits, options_);
    const EpBytes bytes = peer_bytes(map_, limits, options_);
    comm::SymmetricBuffer fresh = machine_.share(*comm_, options_.name, bytes.total);
    Control c = control();
    c.open = 1;
    c.depth = limits.depth;
    c.rows_max = moe::rows_max(limits);
    c.layout = layout;
    for (int r = 0; r < comm_->size(); ++r) c.base_R[r] = fresh.peer(r);
    const std::vector<uint64_t> credits(comm_->size(), static_cast<uint64_t>(c.epoch));
    machine_.write(fresh.local() + layout.credit, credits.data(), 8 * comm_->size());
    set_control(c);
    std::swap(memory_, fresh);
    layout_ = layout;
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

  uint64_t last_rows_ns() const override {
    const Control c = control();
    return c.pushed_ns - c.entered_ns;
  }

  void prepare(const EpPlan& plan, const PrepareArgs& args, Epoch epoch,
               const Stream& stream) override {
    const PrepareView p = view_of(plan, args, epoch);
    Control* const c = here();
    const int64_t experts = map_.experts();
    const int64_t tokens = grid(plan.tokens, kTokenBlock);
    const int64_t slots = grid(std::max(plan.tokens, plan.capacity), kTokenBlock);
    const auto signature = static_cast<uint32_t>(Signature{.op = OpKind::kPrepare}.bits());
    launch("ep prepare, rows", CountRows{c, p, signature}, {slots, shared_counts(experts)}, stream);
    if (p.may_cut()) {
      launch("ep prepare, pairs", CountPairs{c, p, signature}, {tokens, shared_counts(experts)},
             stream);
    }
    if (experts <= NumberPairs<false>::kMostExperts) {
      number<false>(plan, p, tokens, stream);
    } else {
      number<true>(plan, p, tokens, stream);
    }
    launch("ep prepare, slots", FindSlots{c, p},
           {grid(map_.ranks() * plan.tokens_max, FindSlots::kThreads / 32)}, stream);
    machine_.end(stream, comm_->bootstrap());
  }

  void copy_rows(const EpPlan& plan, const DispatchRows& d, const Stream& stream) override {
    const CopyRows rows = view_of(d.x, d.w_TK, d.rows, plan.topk, d.zero_tail);
    move(PushRows{view_of(plan), rows}, ExpandRows{here(), view_of(plan), rows},
         slots_of(plan) * rows.pieces(), plan, d.signature, stream);
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
                              .dots = a.y_CD.defined()};
      move(PushRows{view_of(plan), rows}, step, slots_of(plan) * plan.topk, plan, signature,
           stream);
    });
  }

  void sum_rows(const EpPlan& plan, const SumArgs& sum, const Signature& signature,
                const Stream& stream) override {
    SumRows rows = view_of(sum, plan.topk);
    // Longer runs of pieces save looking up, where enough warps have some.
    const int64_t pieces = plan.tokens * rows.pieces();
    rows.run = static_cast<int32_t>(std::clamp<int64_t>(pieces / (2 * most_warps()), 1, 4));
    const PlanView view = view_of(plan);
    with_row_type(sum.y_CD.dtype(), [&]<class T>(T) {
      const auto take = [&]<class Out>(Out) {
        move(PushSums<T>{view, rows}, TakeSums<T, Out>{here(), view, rows},
             plan.tokens * rows.runs(), plan, signature, stream);
      };
      if (sum.out_TD.dtype() == DType::kFloat32) {
        take(float{});
      } else {
        take(T{});
      }
    });
  }

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
  static constexpr int kBlocks = 2;    // of a multiprocessor
  static constexpr int kPushing = 24;  // multiprocessors

  Control* here() const { return reinterpret_cast<Control*>(control_.local()); }
  int64_t most_blocks() const {
    return std::min(kMostBlocks, kBlocks * machine_.multiprocessors());
  }
  int64_t most_warps() const { return most_blocks() * ExpandRows::kThreads / 32; }
  // Blocks for so many items, of which one has some; a step takes what is left in turn.
  int64_t grid(int64_t items, int64_t of_block) const {
    return std::clamp<int64_t>(ceil_div(items, of_block), 1, most_blocks());
  }
  int64_t slots_of(const EpPlan& plan) const {
    return std::max(map_.ranks() * plan.tokens_max, plan.capacity / 32);
  }
  template <bool many>
  void number(const EpPlan& plan, const PrepareView& p, int64_t blocks, const Stream& stream) {
    using Step = NumberPairs<many>;
    const NumberPlaces places(plan.topk, map_.experts(), Step::kThreads / 32);
    launch("ep prepare, number", Step{here(), p}, {blocks, places.bytes}, stream);
  }

  template <class Step>
  void launch(const char* name, const Step& step, const LaunchSize& size, const Stream& stream) {
    machine_.launch(name, step, size, stream);
  }
  // `items` is what there may be to take, each by a warp.
  template <class Push, class Take>
  void move(const Push& push, const Take& take, int64_t items, const EpPlan& plan,
            const Signature& s, const Stream& stream) {
    static_assert(Take::kBlocks == kBlocks && Take::kThreads == ExpandRows::kThreads);
    launch("ep enter", Enter{here(), static_cast<uint32_t>(s.bits()), s.row_bytes, s.plan}, {},
           stream);
    const int64_t chunks = (map_.ranks() - 1) * ceil_div(plan.tokens_max, options_.chunk_rows);
    const int64_t sms = options_.comm_sms > 0 ? options_.comm_sms : kPushing;
    const int64_t pushers = std::clamp<int64_t>(std::min(chunks, kBlocks * sms), 1,
                                                std::max<int64_t>(1, most_blocks() / 2));
    const int64_t takers =
        std::min(grid(items, Take::kThreads / 32), std::max<int64_t>(1, most_blocks() - pushers));
    launch("ep move", Move<Push, Take>{push, take, pushers},
           {pushers + takers, 4 * options_.chunk_rows}, stream);
    launch("ep rest", TakeRest<Take>{take}, {takers}, stream);
    machine_.end(stream, comm_->bootstrap());
  }

  void make_control() {
    const int experts = map_.experts(), ranks = map_.ranks();
    const ControlPlaces at = control_places(experts, ranks);
    control_ = machine_.share(*comm_, text("{}, control", options_.name), at.bytes);
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
                 .next_W = words(at.next)};
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
  MappedLayout layout_;
  EpBytes bytes_;
  mutable Machine machine_;  // ends first: it may wait for steps that use the memory
};

}  // namespace moiety::moe::peers
