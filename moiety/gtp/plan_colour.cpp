// Stages 5 and 7: slots and events by interval colouring.
#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <tuple>

#include "moiety/gtp/plan_stages.h"

namespace moiety::gtp {
namespace {

// The class of a slot: the shape, and whether its operations cross.
int32_t class_of(int32_t shape, bool crosses) { return 2 * shape + crosses; }

// The numbers of one group's items.
class Numbers {
 public:
  int32_t take(int32_t begin, int32_t end) {
    while (!busy_.empty() && busy_.top().first < begin) {
      free_.push(busy_.top().second);
      busy_.pop();
    }
    if (free_.empty()) free_.push(count_++);
    const int32_t number = free_.top();
    free_.pop();
    busy_.push({end, number});
    return number;
  }
  int32_t count() const { return count_; }

 private:
  template <class T>
  using Lowest = std::priority_queue<T, std::vector<T>, std::greater<T>>;
  Lowest<std::pair<int32_t, int32_t>> busy_;  // (end, number)
  Lowest<int32_t> free_;
  int32_t count_ = 0;
};

std::vector<Interval> slot_intervals(const ShapeTable& shapes, std::span<const Gather> gathers,
                                     std::span<const Reduce> reduces) {
  std::vector<Interval> out;
  out.reserve(gathers.size() + reduces.size());
  for (const Gather& g : gathers) {
    out.push_back(
        {class_of(shapes.of(g), g.crosses), g.issue, g.last_use, static_cast<int32_t>(out.size())});
  }
  for (const Reduce& r : reduces) {
    const auto item = static_cast<int32_t>(out.size());
    // Items without a lane have no slot: their intervals are in a group that nobody counts.
    const int32_t none = class_of(static_cast<int32_t>(shapes.shapes.size()), false);
    const int32_t group = r.lane == kNone ? none : class_of(shapes.of(r), r.crosses);
    out.push_back({group, r.buffer, r.free, item});
  }
  return out;
}

SlotSpec slot_of_class(const ShapeTable& shapes, int32_t c) {
  SlotSpec slot = shapes.shapes[c / 2].slot;
  slot.crosses = c % 2 != 0;
  return slot;
}

// The largest scratch of each lane.
std::vector<int64_t> lane_scratch(const Problem& problem, std::span<const Gather> gathers,
                                  std::span<const Reduce> reduces) {
  std::vector<int64_t> out;
  const auto need = [&](int32_t lane, int64_t bytes) {
    if (lane == kNone) return;
    if (lane >= static_cast<int32_t>(out.size())) out.resize(lane + 1);
    out[lane] = std::max(out[lane], bytes);
  };
  for (const Gather& g : gathers) {
    need(g.lane, problem.bundles[g.bundle].gather_of(g.views).scratch);
  }
  for (const Reduce& r : reduces) {
    need(r.lane, problem.bundles[r.bundle].reduce_of(r.by_rows).scratch);
  }
  return out;
}

std::vector<int32_t> colour_slots(const ShapeTable& shapes, std::span<const Gather> gathers,
                                  std::span<const Reduce> reduces, std::vector<Interval>& intervals,
                                  std::vector<int32_t>& number) {
  intervals = slot_intervals(shapes, gathers, reduces);
  return colour(intervals, 2 * static_cast<int32_t>(shapes.shapes.size()) + 1, number);
}

}  // namespace

std::vector<int32_t> colour(std::vector<Interval>& intervals, int32_t groups,
                            std::vector<int32_t>& number_of_item) {
  std::sort(intervals.begin(), intervals.end(), [](const Interval& a, const Interval& b) {
    return std::tie(a.group, a.begin, a.end, a.item) < std::tie(b.group, b.begin, b.end, b.item);
  });
  std::vector<int32_t> counts(groups, 0);
  for (size_t i = 0; i < intervals.size();) {
    const int32_t group = intervals[i].group;
    Numbers numbers;
    for (; i < intervals.size() && intervals[i].group == group; ++i) {
      number_of_item[intervals[i].item] = numbers.take(intervals[i].begin, intervals[i].end);
    }
    counts[group] = numbers.count();
  }
  return counts;
}

int64_t slot_bytes(const ShapeTable& shapes, std::span<const Gather> gathers,
                   std::span<const Reduce> reduces) {
  std::vector<Interval> intervals;
  std::vector<int32_t> number(gathers.size() + reduces.size());
  const auto counts = colour_slots(shapes, gathers, reduces, intervals, number);
  int64_t bytes = 0;
  for (size_t c = 0; c + 1 < counts.size(); ++c) {
    bytes += counts[c] * shapes.shapes[c / 2].slot.bytes;
  }
  return bytes;
}

int64_t scratch_bytes(const Problem& problem, std::span<const Gather> gathers,
                      std::span<const Reduce> reduces) {
  const std::vector<int64_t> lanes = lane_scratch(problem, gathers, reduces);
  return std::accumulate(lanes.begin(), lanes.end(), int64_t{0});
}

void assign_slots(const Problem& problem, const ShapeTable& shapes, Plan& plan) {
  std::vector<Interval> intervals;
  std::vector<int32_t> number(plan.gathers.size() + plan.reduces.size());
  const auto counts = colour_slots(shapes, plan.gathers, plan.reduces, intervals, number);
  const auto add_class = [&](const SlotSpec& slot, int32_t count) {
    plan.slots.insert(plan.slots.end(), count, slot);
    plan.report.classes.push_back({slot, count});
    plan.report.bytes += count * slot.bytes;
  };
  std::vector<int32_t> first_slot(counts.size(), kNone);
  for (size_t c = 0; c + 1 < counts.size(); ++c) {
    if (counts[c] == 0) continue;
    first_slot[c] = static_cast<int32_t>(plan.slots.size());
    add_class(slot_of_class(shapes, static_cast<int32_t>(c)), counts[c]);
  }
  // Intervals are walked in order of begin, so that each finds the one before it in its slot.
  const auto gathers = static_cast<int32_t>(plan.gathers.size());
  std::vector<int32_t> occupant(plan.slots.size(), kNone);
  for (const Interval& i : intervals) {
    if (first_slot[i.group] == kNone) continue;
    const int32_t slot = first_slot[i.group] + number[i.item];
    if (i.item < gathers) {
      plan.gathers[i.item].slot = slot;
      if (occupant[slot] != kNone) plan.gathers[occupant[slot]].next = i.item;
    } else {
      plan.reduces[i.item - gathers].slot = slot;
      if (occupant[slot] != kNone) plan.reduces[occupant[slot] - gathers].next = i.item - gathers;
    }
    occupant[slot] = i.item;
  }
  const std::vector<int64_t> scratch = lane_scratch(problem, plan.gathers, plan.reduces);
  for (size_t l = 0; l < scratch.size(); ++l) {
    if (scratch[l] == 0) continue;
    LaneSpec& lane = plan.lanes[l];
    lane.scratch = static_cast<int32_t>(plan.slots.size());
    add_class({SlotUse::kScratch, lane.group, lane.expert, false, scratch[l]}, 1);
  }
}

void assign_events(const Timeline& time, Plan& plan) {
  std::vector<Interval> intervals;
  std::vector<int32_t*> holder;
  const auto add = [&](int32_t begin, int32_t end, int32_t& event) {
    const bool external = time.segment[begin] != time.segment[end];
    intervals.push_back({external, begin, end, static_cast<int32_t>(holder.size())});
    holder.push_back(&event);
  };
  for (Gather& g : plan.gathers) {
    add(g.issue, g.last_use, g.ready_event);
    if (g.next != kNone) add(g.first_use + 1, plan.gathers[g.next].issue, g.read_event);
  }
  for (Reduce& r : plan.reduces) {
    if (r.next != kNone) add(r.grad, plan.reduces[r.next].buffer, r.event);
  }
  std::vector<int32_t> number(holder.size());
  const std::vector<int32_t> counts = colour(intervals, 2, number);
  for (const Interval& i : intervals) {
    *holder[i.item] = number[i.item] + (i.group ? counts[0] : 0);
  }
  plan.external = counts[0];
  plan.events = counts[0] + counts[1];
}

}  // namespace moiety::gtp
