#include "moiety/gtp/plan.h"

#include <algorithm>
#include <numeric>

#include "moiety/base/error.h"
#include "moiety/gtp/plan_stages.h"

namespace moiety::gtp {
namespace {

void check_bundles(std::span<const BundleSpec> bundles) {
  for (size_t i = 0; i < bundles.size(); ++i) {
    const BundleSpec& b = bundles[i];
    MOIETY_CHECK(b.group_size >= 1, "gtp plan: bundle {} {} has a group of {}", i, b.name,
                 b.group_size);
    const auto check = [&](const char* what, const BundleSpec::Transfer& t) {
      MOIETY_CHECK(t.received >= 0 && t.slot >= 0 && t.scratch >= 0,
                   "gtp plan: {} of bundle {} {} receives {} bytes, with {} of slot and {} of "
                   "scratch",
                   what, i, b.name, t.received, t.slot, t.scratch);
    };
    for (const BundleSpec::Transfer& t : b.gather) check("a gather", t);
    check("the reduce", b.reduce);
    check("the reduce of rows", b.rows.reduce);
  }
}

void check_policy(const Policy& p) {
  MOIETY_CHECK(p.flops_per_ns > 0 && p.memory_bytes_per_ns > 0,
               "gtp plan: {} flops and {} bytes of memory per ns", p.flops_per_ns,
               p.memory_bytes_per_ns);
  MOIETY_CHECK(p.latency_ns >= 0 && p.bytes_per_ns > 0 && p.slack >= 0,
               "gtp plan: latency {} ns, {} bytes per ns, slack {}", p.latency_ns, p.bytes_per_ns,
               p.slack);
  MOIETY_CHECK(p.max_ahead_dense >= 1 && p.max_ahead_expert >= 1 && p.keep_span >= 0,
               "gtp plan: max_ahead {} (dense) and {} (expert) must be at least 1, keep_span {} at "
               "least 0",
               p.max_ahead_dense, p.max_ahead_expert, p.keep_span);
}

// Items by position, in their own order within a position. `for_each(f)` calls f(position, item)
// for all.
template <class ForEach>
PerPosition per_position(int32_t positions, ForEach&& for_each) {
  PerPosition out;
  out.begin.assign(positions + 1, 0);
  for_each([&](int32_t p, int32_t) { ++out.begin[p + 1]; });
  std::partial_sum(out.begin.begin(), out.begin.end(), out.begin.begin());
  out.items.resize(out.begin.back());
  std::vector<int32_t> at(out.begin.begin(), out.begin.end() - 1);
  for_each([&](int32_t p, int32_t item) { out.items[at[p]++] = item; });
  return out;
}

// Fits the gathers for the uses into slot_bytes: merges are given up first, the latest accepted
// first, then the look-ahead of the shape that takes most memory.
class Budget {
 public:
  Budget(const Problem& problem, std::span<const Use> uses, std::span<const Reduce> reduces,
         const LaneTable& lanes, ShapeTable& shapes)
      : problem_(problem), uses_(uses), reduces_(reduces), lanes_(lanes), shapes_(shapes) {}

  void fit(Plan& plan, std::vector<int32_t>& gather_of) {
    const std::vector<int32_t> all = coalesce(problem_, uses_);
    kept_ = all;
    if (!fits() && !kept_.empty()) {
      size_t fitting = 0, too_many = all.size();
      while (too_many - fitting > 1) {
        const size_t middle = std::midpoint(fitting, too_many);
        kept_.assign(all.begin(), all.begin() + middle);
        (fits() ? fitting : too_many) = middle;
      }
      kept_.assign(all.begin(), all.begin() + fitting);
    }
    while (!fits()) lower();
    plan.report.merges = static_cast<int32_t>(kept_.size());
    plan.report.undone = static_cast<int32_t>(all.size() - kept_.size());
    plan.gathers = std::move(gathers_);
    gather_of = std::move(gather_of_);
  }

 private:
  bool fits() {
    gathers_ = gathers_of(uses_, kept_, gather_of_);
    hoist(problem_, shapes_, lanes_, gathers_);
    return slot_bytes(shapes_, gathers_, reduces_) + scratch_bytes(problem_, gathers_, reduces_) <=
           problem_.policy.slot_bytes;
  }

  // Lowers the look-ahead by one, from the value that is really used.
  void lower() {
    std::vector<int> ahead(shapes_.shapes.size(), 0);
    for (const Gather& g : gathers_) {
      int& a = ahead[shapes_.of(g)];
      a = std::max(a, g.first_use - g.issue);
    }
    Plan draft;
    draft.lanes = lanes_.lanes;
    draft.gathers = gathers_;
    draft.reduces.assign(reduces_.begin(), reduces_.end());
    assign_slots(problem_, shapes_, draft);
    int32_t largest = kNone;
    int64_t most = -1;
    for (size_t s = 0; s < ahead.size(); ++s) {
      if (ahead[s] <= 1) continue;
      int64_t bytes = 0;
      for (const Report::Class& c : draft.report.classes) {
        SlotSpec slot = c.slot;
        slot.crosses = false;
        if (slot == shapes_.shapes[s].slot) bytes += c.bytes();
      }
      if (bytes > most) {
        most = bytes;
        largest = static_cast<int32_t>(s);
      }
    }
    if (largest == kNone) refuse(draft.report);
    shapes_.shapes[largest].ahead = ahead[largest] - 1;
  }

  [[noreturn]] void refuse(Report& report) {
    std::sort(report.classes.begin(), report.classes.end(),
              [](const auto& a, const auto& b) { return a.bytes() > b.bytes(); });
    std::string classes;
    for (size_t i = 0; i < report.classes.size() && i < 3; ++i) {
      const Report::Class& c = report.classes[i];
      classes +=
          text("{}{} {} {} of {}", i == 0 ? "" : ", ", c.count, c.slot.expert ? "expert" : "dense",
               name(c.slot.use), bytes_text(c.slot.bytes));
    }
    fail(ErrorKind::kInvalidArgument,
         "gtp plan: slots need {}, slot_bytes allows {}; the largest are {}",
         bytes_text(report.bytes), bytes_text(problem_.policy.slot_bytes), classes);
  }

  const Problem& problem_;
  std::span<const Use> uses_;
  std::span<const Reduce> reduces_;
  const LaneTable& lanes_;
  ShapeTable& shapes_;
  std::vector<int32_t> kept_;  // uses whose gather is kept
  std::vector<Gather> gathers_;
  std::vector<int32_t> gather_of_;
};

// Makes the indices that the executor looks up by position.
void index_positions(std::span<const Use> uses, std::span<const int32_t> gather_of, Plan& plan) {
  plan.waits = per_position(plan.positions, [&](auto&& add) {
    for (size_t i = 0; i < uses.size(); ++i) add(uses[i].position, gather_of[i]);
  });
  plan.issues = per_position(plan.positions, [&](auto&& add) {
    for (size_t g = 0; g < plan.gathers.size(); ++g) {
      add(plan.gathers[g].issue, static_cast<int32_t>(g));
    }
  });
  plan.reduce_at.assign(plan.positions, kNone);
  for (size_t r = 0; r < plan.reduces.size(); ++r) {
    plan.reduce_at[plan.reduces[r].buffer] = static_cast<int32_t>(r);
    plan.reduce_at[plan.reduces[r].grad] = static_cast<int32_t>(r);
  }
}

// Marks the first gather of each bundle in the order of the host.
void mark_publishes(size_t bundles, Plan& plan) {
  std::vector<bool> seen(bundles);
  for (const int32_t g : plan.issues.items) {
    Gather& gather = plan.gathers[g];
    gather.publishes = !seen[gather.bundle];
    seen[gather.bundle] = true;
  }
}

}  // namespace

const char* name(SlotUse use) {
  constexpr const char* kNames[] = {"gather slots", "send slots", "scratch"};
  return kNames[static_cast<int>(use)];
}

Policy Policy::for_memory(int64_t device_bytes) {
  Policy out;
  out.slot_bytes = device_bytes / 20 * 3;
  out.keep_bytes = out.send_bytes = out.slot_bytes / 2;
  return out;
}

Timeline::Timeline(std::span<const TraceEvent> events) : trace(events), t{0} {
  for (size_t i = 0; i < events.size(); ++i) {
    if (!events[i].same_call) {
      const auto p = static_cast<int32_t>(first.size());
      const bool cut = events[i].kind == Kind::kCut;
      if (p == 0 || cut) begin_of_segment.push_back(p);
      segment.push_back(static_cast<int32_t>(begin_of_segment.size()) - 1);
      first.push_back(static_cast<int32_t>(i));
      t.push_back(t.back());
    }
    t.back() += static_cast<double>(events[i].work_ns);
  }
  positions = static_cast<int32_t>(first.size());
  first.push_back(static_cast<int32_t>(events.size()));
}

int32_t Timeline::segment_end(int32_t p) const {
  const size_t next = static_cast<size_t>(segment[p]) + 1;
  return (next < begin_of_segment.size() ? begin_of_segment[next] : positions) - 1;
}

Plan plan(std::span<const TraceEvent> trace, std::span<const BundleSpec> bundles,
          const Policy& policy) {
  check_bundles(bundles);
  check_policy(policy);
  check_trace(trace, static_cast<int32_t>(bundles.size()));
  const Timeline time(trace);
  const Problem problem{time, bundles, policy};
  Plan out;
  out.positions = time.positions;
  const std::vector<Use> uses = demand(problem);
  out.reduces = find_reduces(problem);
  const LaneTable lanes(problem, uses, out.reduces);
  ShapeTable shapes(bundles, policy);
  out.lanes = lanes.lanes;
  estimate_sends(problem, lanes, out.reduces);
  out.report.shortened = shorten_sends(problem, shapes, out.reduces);
  std::vector<int32_t> gather_of;
  Budget(problem, uses, out.reduces, lanes, shapes).fit(out, gather_of);
  assign_slots(problem, shapes, out);
  assign_events(time, out);
  index_positions(uses, gather_of, out);
  mark_publishes(bundles.size(), out);
  const auto crosses = [](const auto& op) { return op.crosses; };
  out.report.crossings =
      static_cast<int32_t>(std::count_if(out.gathers.begin(), out.gathers.end(), crosses) +
                           std::count_if(out.reduces.begin(), out.reduces.end(), crosses));
  report_times(problem, out);
  out.hash = hash_of(out);
  // The plan is checked, since it is made once and used for thousands of steps: a slot that two
  // share would be a wrong weight, and nothing would say so.
  const auto broken = check_plan(out, trace, bundles, policy);
  MOIETY_CHECK(!broken, "gtp plan: the planner broke an invariant, {}", broken.value_or(""));
  return out;
}

}  // namespace moiety::gtp
