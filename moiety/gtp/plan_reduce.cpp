// Stage 6: the reduces, and the time for which they hold their send slots.
#include <algorithm>
#include <numeric>

#include "moiety/gtp/plan_stages.h"

namespace moiety::gtp {

std::vector<Reduce> find_reduces(const Problem& problem) {
  const Timeline& time = problem.time;
  std::vector<Reduce> reduces;
  std::vector<int32_t> buffer(problem.bundles.size()), latest(problem.bundles.size(), kNone);
  for (int32_t p = 0; p < time.positions; ++p) {
    const TraceEvent& e = time.call(p)[0];
    if (begins_gradient(e.kind)) buffer[e.bundle] = p;
    if (!ends_gradient(e.kind)) continue;
    Reduce r;
    r.bundle = e.bundle;
    r.by_rows = e.kind == Kind::kRowsGrad;
    r.buffer = buffer[e.bundle];
    r.grad = r.free = p;
    r.first = latest[e.bundle] == kNone;
    r.last = true;
    if (!r.first) {
      Reduce& before = reduces[latest[e.bundle]];
      before.last = false;
      const bool in_place = problem.bundles[e.bundle].group_size == 1;
      if (in_place) before.next = static_cast<int32_t>(reduces.size());
    }
    latest[e.bundle] = static_cast<int32_t>(reduces.size());
    reduces.push_back(r);
  }
  return reduces;
}

void estimate_sends(const Problem& problem, const LaneTable& lanes, std::span<Reduce> reduces) {
  const auto& [time, bundles, policy] = problem;
  std::vector<double> lane_free(lanes.lanes.size(), 0);
  const auto begin = time.t.begin(), end = begin + time.positions;
  for (Reduce& r : reduces) {
    r.lane = lanes.of_reduces(r.bundle);
    if (r.lane == kNone) continue;
    double& free = lane_free[r.lane];
    free = std::max(time.t[r.grad], free) +
           transfer_ns(policy, bundles[r.bundle].reduce_of(r.by_rows));
    const auto q = static_cast<int32_t>(std::lower_bound(begin, end, free) - begin);
    const int32_t last = policy.cross_cuts ? time.positions - 1 : time.segment_end(r.grad);
    r.free = std::clamp(q, r.grad, last);
    r.crosses = time.segment[r.buffer] != time.segment[r.free];
  }
}

int32_t shorten_sends(const Problem& problem, const ShapeTable& shapes, std::span<Reduce> reduces) {
  const std::vector<Reduce> full(reduces.begin(), reduces.end());
  std::vector<int32_t> longest;
  for (int32_t i = 0; i < static_cast<int32_t>(full.size()); ++i) {
    if (full[i].free > full[i].grad) longest.push_back(i);
  }
  std::stable_sort(longest.begin(), longest.end(), [&](int32_t a, int32_t b) {
    return full[a].free - full[a].grad > full[b].free - full[b].grad;
  });
  const auto shorten = [&](int32_t count) {
    std::copy(full.begin(), full.end(), reduces.begin());
    for (int32_t i = 0; i < count; ++i) {
      Reduce& r = reduces[longest[i]];
      r.free = r.grad;
      r.crosses = problem.time.segment[r.buffer] != problem.time.segment[r.free];
    }
    return slot_bytes(shapes, {}, reduces) <= problem.policy.send_bytes;
  };
  // Shortens as few as possible; all of them if that is not enough.
  if (shorten(0)) return 0;
  int32_t too_few = 0, enough = static_cast<int32_t>(longest.size());
  while (enough - too_few > 1) {
    const int32_t middle = std::midpoint(too_few, enough);
    (shorten(middle) ? enough : too_few) = middle;
  }
  shorten(enough);
  return enough;
}

}  // namespace moiety::gtp
