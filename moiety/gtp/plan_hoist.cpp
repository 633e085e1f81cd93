// Stages 3 and 4: the lanes on which gathers are issued, and the positions.
#include <algorithm>
#include <limits>
#include <map>
#include <tuple>

#include "moiety/gtp/plan_stages.h"

namespace moiety::gtp {

ShapeTable::ShapeTable(std::span<const BundleSpec> bundles, const Policy& policy) {
  std::map<SlotSpec, int32_t> numbers;
  const auto gather_slot = [](const BundleSpec& b, Views views) {
    return SlotSpec{SlotUse::kGather, b.group, b.expert, false, b.gather_of(views).slot};
  };
  const auto send_slot = [](const BundleSpec& b, bool by_rows) {
    return SlotSpec{SlotUse::kSend, b.group, b.expert, false, b.reduce_of(by_rows).slot};
  };
  for (const BundleSpec& b : bundles) {
    for (Views v = 1; v <= (kRowView | kColView); ++v) numbers[gather_slot(b, v)];
    for (const bool by_rows : {false, true}) numbers[send_slot(b, by_rows)];
  }
  for (auto& [slot, number] : numbers) {
    number = static_cast<int32_t>(shapes.size());
    shapes.push_back({slot, slot.expert ? policy.max_ahead_expert : policy.max_ahead_dense});
  }
  for (const BundleSpec& b : bundles) {
    for (Views v = 1; v <= (kRowView | kColView); ++v) {
      gather_.push_back(numbers.at(gather_slot(b, v)));
    }
    for (const bool by_rows : {false, true}) send_.push_back(numbers.at(send_slot(b, by_rows)));
  }
}

LaneTable::LaneTable(const Problem& problem, std::span<const Use> uses,
                     std::span<const Reduce> reduces) {
  using Key = std::tuple<int, bool, bool>;
  std::map<Key, int32_t> numbers;
  const auto key = [&](BundleId b, bool of_reduces) {
    return Key{problem.bundles[b].group, problem.bundles[b].expert, of_reduces};
  };
  for (const Use& u : uses) numbers[key(u.bundle, false)];
  for (const Reduce& r : reduces) {
    if (problem.bundles[r.bundle].group_size > 1) numbers[key(r.bundle, true)];
  }
  for (auto& [k, number] : numbers) {
    number = static_cast<int32_t>(lanes.size());
    lanes.push_back({std::get<0>(k), std::get<1>(k), std::get<2>(k), kNone});
  }
  for (BundleId b = 0; b < static_cast<BundleId>(problem.bundles.size()); ++b) {
    for (const bool of_reduces : {false, true}) {
      const auto found = numbers.find(key(b, of_reduces));
      const bool none = found == numbers.end() || problem.bundles[b].group_size == 1;
      (of_reduces ? reduce_ : gather_).push_back(none ? kNone : found->second);
    }
  }
}

double transfer_ns(const Policy& policy, const BundleSpec::Transfer& transfer) {
  return policy.latency_ns + static_cast<double>(transfer.received) / policy.bytes_per_ns;
}

void hoist(const Problem& problem, const ShapeTable& shapes, const LaneTable& lanes,
           std::span<Gather> gathers) {
  const auto& [time, bundles, policy] = problem;
  constexpr double kNever = std::numeric_limits<double>::infinity();
  std::vector<double> next(lanes.lanes.size(), kNever);
  const auto floor = [&](const Gather& g) {
    return policy.cross_cuts ? 0 : time.segment_begin(g.first_use);
  };
  const auto begin = time.t.begin(), end = begin + time.positions;
  for (size_t i = gathers.size(); i-- > 0;) {
    Gather& g = gathers[i];
    g.lane = lanes.of_gathers(g.bundle);
    const double transfer = transfer_ns(policy, bundles[g.bundle].gather_of(g.views));
    const double start = std::min(time.t[g.first_use], next[g.lane]) - policy.slack * transfer;
    // The last position that is not later than `start`.
    const auto p = static_cast<int32_t>(std::upper_bound(begin, end, start) - begin) - 1;
    g.issue = std::max({p, floor(g), g.first_use - shapes.shapes[shapes.of(g)].ahead});
    if (g.issue >= g.first_use) g.issue = std::max(g.first_use - 1, floor(g));
    next[g.lane] = std::max(start, time.t[g.issue]);
  }
  std::vector<int32_t> earliest(lanes.lanes.size(), 0);
  for (Gather& g : gathers) {
    g.issue = earliest[g.lane] = std::max(g.issue, earliest[g.lane]);
    g.crosses = time.segment[g.issue] != time.segment[g.last_use];
  }
}

}  // namespace moiety::gtp
