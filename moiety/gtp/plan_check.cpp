// The invariants of a plan, computed from the trace anew: nothing here calls a stage of the
// planner.
#include <algorithm>
#include <map>

#include "moiety/base/format.h"
#include "moiety/gtp/plan.h"
#include "moiety/gtp/race.h"

namespace moiety::gtp {
namespace {

struct Held {
  int32_t begin, end;  // positions, both included
};

// The largest number that hold at one position.
int32_t overlap(const std::vector<Held>& held) {
  std::map<int32_t, int32_t> change;
  for (const Held& h : held) {
    ++change[h.begin];
    --change[h.end + 1];
  }
  int32_t now = 0, most = 0;
  for (const auto& [position, by] : change) most = std::max(most, now += by);
  return most;
}

class Checker {
 public:
  Checker(const Plan& plan, std::span<const TraceEvent> trace, std::span<const BundleSpec> bundles,
          const Policy& policy)
      : plan_(plan), trace_(trace), bundles_(bundles), policy_(policy) {}

  std::optional<std::string> run() {
    check_uses();
    check_issues();
    check_slots();
    check_reduces();
    check_events();
    if (fault_) return fault_;  // the replay needs a well-formed plan
    if (const auto race = find_race(plan_, trace_)) {
      fault("I9: step {}, position {}: {}", race->step, race->position, race->text);
    }
    return fault_;
  }

 private:
  template <class... Args>
  void fault(std::string_view format, const Args&... args) {
    if (!fault_) fault_ = text(format, args...);
  }
  template <class... Args>
  void expect(bool holds, std::string_view format, const Args&... args) {
    if (!holds) fault(format, args...);
  }

  // Checks I1 by walking the trace and the waits together.
  void check_uses() {
    int32_t p = -1, begin_of_segment = 0;
    size_t found = 0;
    std::vector<Held> uses(plan_.gathers.size(), {-1, -1});
    std::vector<Views> views(plan_.gathers.size(), 0);
    for (const TraceEvent& e : trace_) {
      if (!e.same_call) {
        expect(p < 0 || plan_.waits[p].size() == found,
               "I1: {} gathers at position {}, expected {}", p < 0 ? 0 : plan_.waits[p].size(), p,
               found);
        ++p;
        found = 0;
        if (p >= plan_.positions) return fault("I1: {} positions, more in the trace", p);
        if (e.kind == Kind::kCut) begin_of_segment = p;
        segment_begin_.push_back(begin_of_segment);
      }
      if (!is_consume(e.kind) || bundles_[e.bundle].group_size == 1) continue;
      const Views view = bundles_[e.bundle].view_of(e.kind);
      const bool col = view == kColView && !bundles_[e.bundle].one_payload;
      for (const int32_t g : plan_.waits[p]) {
        const Gather& gather = plan_.gathers[g];
        if (gather.bundle != e.bundle) continue;
        ++found;
        expect(gather.payload == (col ? Payload::kCol : Payload::kRow),
               "I1: the wrong payload of bundle {} at position {}", e.bundle, p);
        if (uses[g].begin < 0) uses[g].begin = p;
        uses[g].end = p;
        views[g] |= view;
      }
    }
    if (p + 1 != plan_.positions) {
      return fault("I1: {} positions, {} in the trace", plan_.positions, p + 1);
    }
    expect(plan_.waits[p].size() == found, "I1: a gather is waited for at the flush");
    for (size_t g = 0; g < uses.size(); ++g) {
      const Gather& gather = plan_.gathers[g];
      expect(uses[g].begin == gather.first_use && uses[g].end == gather.last_use &&
                 views[g] == gather.views,
             "I1: gather {} is used from {} to {}, not from {} to {}", g, uses[g].begin,
             uses[g].end, gather.first_use, gather.last_use);
    }
  }

  // Checks I2, I4 and I5.
  void check_issues() {
    std::vector<int32_t> latest(plan_.lanes.size(), kNone);
    std::vector<bool> seen(bundles_.size());
    int32_t count = 0;
    for (int32_t p = 0; p < plan_.positions && !fault_; ++p) {
      for (const int32_t i : plan_.issues[p]) {
        const Gather& g = plan_.gathers[i];
        const BundleSpec& b = bundles_[g.bundle];
        const LaneSpec& lane = plan_.lanes[g.lane];
        ++count;
        expect(g.issue == p && p < g.first_use, "I2: gather {} for position {} issued at {}", i,
               g.first_use, p);
        expect(lane.group == b.group && lane.expert == b.expert && !lane.reduces,
               "I4: gather {} is on a lane of others", i);
        int32_t& before = latest[g.lane];
        expect(before == kNone || plan_.gathers[before].first_use <= g.first_use,
               "I4: gather {} is issued behind {}, which is used later", i, before);
        before = i;
        expect(policy_.cross_cuts || g.issue >= segment_begin_[g.first_use],
               "I5: gather {} is issued at {}, before the cut at {}", i, p,
               segment_begin_[g.first_use]);
        expect(g.publishes == !seen[g.bundle], "I5: gather {} of bundle {} has the wrong order", i,
               g.bundle);
        seen[g.bundle] = true;
      }
    }
    expect(count == static_cast<int32_t>(plan_.gathers.size()), "I1: {} of {} gathers are issued",
           count, plan_.gathers.size());
  }

  // Checks I3, I8 and I10.
  void check_slots() {
    std::vector<std::vector<Held>> slots(plan_.slots.size());
    const auto hold = [&](int32_t slot, const SlotSpec& expected, int32_t begin, int32_t end) {
      if (slot < 0 || plan_.slots[slot] != expected) {
        return fault("I3: an operation in slot {}", slot);
      }
      if (end >= plan_.positions) {
        return fault("I8: slot {} is held until {} of {}", slot, end, plan_.positions);
      }
      slots[slot].push_back({begin, end});
    };
    // False if `b` is past the end, which `hold` reports.
    const auto segments_differ = [&](int32_t a, int32_t b) {
      return b < plan_.positions && segment_begin_[a] != segment_begin_[b];
    };
    for (const Gather& g : plan_.gathers) {
      const BundleSpec& b = bundles_[g.bundle];
      hold(g.slot,
           {SlotUse::kGather, b.group, b.expert, segments_differ(g.issue, g.last_use),
            b.gather_of(g.views).slot},
           g.issue, g.last_use);
    }
    for (const Reduce& r : plan_.reduces) {
      const BundleSpec& b = bundles_[r.bundle];
      if (b.group_size == 1) continue;
      hold(r.slot,
           {SlotUse::kSend, b.group, b.expert, segments_differ(r.buffer, r.free),
            b.reduce_of(r.by_rows).slot},
           r.buffer, r.free);
    }
    std::map<SlotSpec, std::vector<Held>> classes;
    std::map<SlotSpec, int32_t> counts;
    for (size_t s = 0; s < slots.size(); ++s) {
      if (plan_.slots[s].use == SlotUse::kScratch) continue;
      expect(overlap(slots[s]) == 1, "I3: {} operations at once in slot {}", overlap(slots[s]), s);
      ++counts[plan_.slots[s]];
      auto& all = classes[plan_.slots[s]];
      all.insert(all.end(), slots[s].begin(), slots[s].end());
    }
    for (const auto& [spec, held] : classes) {
      expect(overlap(held) == counts[spec], "I10: {} {} for at most {} at once", counts[spec],
             name(spec.use), overlap(held));
    }
  }

  // Checks I6 and I7.
  void check_reduces() {
    std::vector<int32_t> latest(bundles_.size(), kNone), buffer(bundles_.size(), kNone);
    int32_t p = -1, count = 0;
    for (const TraceEvent& e : trace_) {
      p += !e.same_call;
      if (fault_) return;
      const int32_t i = plan_.reduce_at[p];
      if (!begins_gradient(e.kind) && !ends_gradient(e.kind)) {
        expect(i == kNone, "I6: a reduce at position {}, which is {}", p, name(e.kind));
        continue;
      }
      if (i == kNone) return fault("I6: no reduce at position {}", p);
      const Reduce& r = plan_.reduces[i];
      expect(r.bundle == e.bundle, "I6: position {} reduces bundle {}", p, r.bundle);
      if (begins_gradient(e.kind)) buffer[e.bundle] = p;
      if (!ends_gradient(e.kind)) continue;
      expect(i == count++ && r.grad == p && r.buffer == buffer[e.bundle] && r.free >= p,
             "I6: reduce {} at position {} is out of order", i, p);
      expect(r.by_rows == (e.kind == Kind::kRowsGrad), "I6: reduce {} moves something else", i);
      const BundleSpec& b = bundles_[e.bundle];
      const bool none = r.lane == kNone;
      expect(none == (b.group_size == 1), "I6: reduce {} on lane {}", i, r.lane);
      expect(none || (plan_.lanes[r.lane].reduces && plan_.lanes[r.lane].group == b.group &&
                      plan_.lanes[r.lane].expert == b.expert),
             "I6: reduce {} is on a lane of others", i);
      int32_t& before = latest[e.bundle];
      expect(r.first == (before == kNone), "I7: reduce {} of bundle {} overwrites", i, e.bundle);
      expect(before == kNone || !plan_.reduces[before].last,
             "I7: bundle {} is reported before reduce {}", e.bundle, i);
      before = i;
    }
    expect(count == static_cast<int32_t>(plan_.reduces.size()), "I6: {} reduces for {} gradients",
           plan_.reduces.size(), count);
    for (const int32_t i : latest) {
      expect(i == kNone || plan_.reduces[i].last, "I7: reduce {} does not report", i);
    }
  }

  // Checks the indices that the replay follows.
  void check_events() {
    const auto check = [&](int32_t event, bool needed) {
      expect(event < plan_.events && event >= (needed ? 0 : kNone), "I9: event {} of {}", event,
             plan_.events);
    };
    for (const Gather& g : plan_.gathers) {
      check(g.ready_event, true);
      check(g.read_event, false);
    }
    for (const Reduce& r : plan_.reduces) check(r.event, false);
  }

  const Plan& plan_;
  std::span<const TraceEvent> trace_;
  std::span<const BundleSpec> bundles_;
  const Policy& policy_;
  std::vector<int32_t> segment_begin_;  // by position
  std::optional<std::string> fault_;
};

}  // namespace

std::optional<std::string> check_plan(const Plan& plan, std::span<const TraceEvent> trace,
                                      std::span<const BundleSpec> bundles, const Policy& policy) {
  if (trace.empty()) return std::nullopt;
  return Checker(plan, trace, bundles, policy).run();
}

}  // namespace moiety::gtp
