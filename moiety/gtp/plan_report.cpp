// The report on a plan: simulated waits, and the hash that ranks compare.
#include <algorithm>

#include "moiety/gtp/hash.h"
#include "moiety/gtp/plan_stages.h"

namespace moiety::gtp {
namespace {

// The bundle whose rows are read from peers at the position.
const BundleSpec* looked_up(const Problem& problem, int32_t p) {
  const TraceEvent& e = problem.time.call(p)[0];
  if (e.kind != Kind::kRows || problem.bundles[e.bundle].group_size == 1) return nullptr;
  return &problem.bundles[e.bundle];
}

class Simulation {
 public:
  Simulation(const Problem& problem, const Plan& plan)
      : problem_(problem), plan_(plan), lane_free_(plan.lanes.size(), 0) {
    out_.gathers.resize(plan.gathers.size());
    out_.reduces.resize(plan.reduces.size());
    send_free_.resize(plan.slots.size());
  }

  Schedule run() {
    for (int32_t p = 0; p < plan_.positions; ++p) call(p);
    for (size_t l = 0; l < plan_.lanes.size(); ++l) {
      if (plan_.lanes[l].reduces) wait(lane_free_[l], out_.flush_wait);
    }
    return std::move(out_);
  }

 private:
  void call(int32_t p) {
    for (const int32_t g : plan_.waits[p]) wait(out_.gathers[g].end, out_.gather_wait);
    if (const BundleSpec* b = looked_up(problem_, p)) {
      wait(clock_ + transfer_ns(problem_.policy, {b->rows.lookup, 0, 0}), out_.gather_wait);
    }
    const int32_t r = plan_.reduce_at[p];
    if (r != kNone && plan_.reduces[r].lane != kNone) {
      const Reduce& reduce = plan_.reduces[r];
      double& free = send_free_[reduce.slot];
      if (p == reduce.buffer) wait(free, out_.send_wait);
      if (p == reduce.grad) {
        out_.reduces[r] =
            transfer(reduce.lane, problem_.bundles[reduce.bundle].reduce_of(reduce.by_rows));
        free = out_.reduces[r].end;
      }
    }
    for (const int32_t i : plan_.issues[p]) {
      const Gather& g = plan_.gathers[i];
      out_.gathers[i] = transfer(g.lane, problem_.bundles[g.bundle].gather_of(g.views));
    }
    const double begin = clock_;
    clock_ += problem_.time.t[p + 1] - problem_.time.t[p];
    out_.work.push_back({begin, clock_});
  }

  void wait(double until, double& waited) {
    waited += std::max(0.0, until - clock_);
    clock_ = std::max(clock_, until);
  }
  Schedule::Span transfer(int32_t lane, const BundleSpec::Transfer& what) {
    const double begin = std::max(lane_free_[lane], clock_);
    return {begin, lane_free_[lane] = begin + transfer_ns(problem_.policy, what)};
  }

  const Problem problem_;
  const Plan& plan_;
  double clock_ = 0;
  std::vector<double> lane_free_, send_free_;
  Schedule out_;
};

}  // namespace

Schedule simulate(const Plan& plan, std::span<const TraceEvent> trace,
                  std::span<const BundleSpec> bundles, const Policy& policy) {
  const Timeline time(trace);
  return Simulation({time, bundles, policy}, plan).run();
}

void report_times(const Problem& problem, Plan& plan) {
  Report& report = plan.report;
  const Schedule schedule = Simulation(problem, plan).run();
  report.work_ns = problem.time.t[plan.positions];
  report.gather_wait_ns = schedule.gather_wait;
  report.send_wait_ns = schedule.send_wait;
  report.flush_wait_ns = schedule.flush_wait;
  for (const Gather& g : plan.gathers) {
    report.received += problem.bundles[g.bundle].gather_of(g.views).received;
  }
  for (const Reduce& r : plan.reduces) {
    if (r.lane == kNone) continue;
    report.received += problem.bundles[r.bundle].reduce_of(r.by_rows).received;
  }
  for (int32_t p = 0; p < plan.positions; ++p) {
    if (const BundleSpec* b = looked_up(problem, p)) report.received += b->rows.lookup;
  }
}

uint64_t hash_of(const Plan& plan) {
  Hash h;
  h.add(plan.positions, plan.events, plan.external);
  for (const Gather& g : plan.gathers) {
    h.add(g.bundle, g.payload, g.views, g.publishes, g.crosses, g.issue, g.first_use, g.last_use,
          g.lane, g.slot, g.next, g.ready_event, g.read_event);
  }
  for (const Reduce& r : plan.reduces) {
    h.add(r.bundle, r.by_rows, r.first, r.last, r.crosses, r.buffer, r.grad, r.free, r.lane, r.slot,
          r.next, r.event);
  }
  for (const LaneSpec& l : plan.lanes) h.add(l.group, l.expert, l.reduces, l.scratch);
  for (const SlotSpec& s : plan.slots) h.add(s.use, s.group, s.expert, s.crosses, s.bytes);
  for (const PerPosition* list : {&plan.waits, &plan.issues}) {
    for (const int32_t i : list->begin) h.add(i);
    for (const int32_t i : list->items) h.add(i);
  }
  for (const int32_t r : plan.reduce_at) h.add(r);
  return h.value();
}

}  // namespace moiety::gtp
