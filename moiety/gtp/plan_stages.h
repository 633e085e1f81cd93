// The stages of `plan`. Internal to moiety/gtp; contract: plan.h.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "moiety/gtp/plan.h"

namespace moiety::gtp {

// The trace by position.
struct Timeline {
  explicit Timeline(std::span<const TraceEvent> trace);

  std::span<const TraceEvent> call(int32_t p) const {
    return trace.subspan(first[p], static_cast<size_t>(first[p + 1] - first[p]));
  }
  int32_t segment_begin(int32_t p) const { return begin_of_segment[segment[p]]; }
  int32_t segment_end(int32_t p) const;  // its last position

  std::span<const TraceEvent> trace;
  int32_t positions = 0;
  std::vector<int32_t> first;    // [positions + 1] event
  std::vector<double> t;         // [positions + 1] work before the position, ns
  std::vector<int32_t> segment;  // [positions] cuts at or before it: a cut opens its segment
  std::vector<int32_t> begin_of_segment;
};

struct Problem {
  const Timeline& time;
  std::span<const BundleSpec> bundles;
  const Policy& policy;
};

double transfer_ns(const Policy& policy, const BundleSpec::Transfer& transfer);

// ---- demand and coalesce

// One consume of a bundle whose shards lie on several ranks.
struct Use {
  BundleId bundle;
  Payload payload;
  Views view;
  int32_t position;
  int32_t next;  // use of the same bundle and payload; kNone
};
// By position, bundle.
std::vector<Use> demand(const Problem& problem);
// Uses whose gather is kept for their `next`, in the order in which they were accepted: by span and
// position. A prefix of the list is within the same limits.
std::vector<int32_t> coalesce(const Problem& problem, std::span<const Use> uses);
// One gather for each run of kept uses, in order of first use; `gather_of` has that of each use.
std::vector<Gather> gathers_of(std::span<const Use> uses, std::span<const int32_t> kept,
                               std::vector<int32_t>& gather_of);

// ---- hoist

// The gathers and sends of a shape, of which the budget may lower the look-ahead.
class ShapeTable {
 public:
  ShapeTable(std::span<const BundleSpec> bundles, const Policy& policy);
  struct Shape {
    SlotSpec slot;  // crosses is false
    int ahead = 0;  // of gathers
  };
  std::vector<Shape> shapes;  // ascending
  int32_t of(const Gather& g) const { return gather_[3 * g.bundle + g.views - 1]; }
  int32_t of(const Reduce& r) const { return send_[2 * r.bundle + r.by_rows]; }

 private:
  std::vector<int32_t> gather_, send_;
};

// Lanes by group, class and purpose, those that something is issued on.
class LaneTable {
 public:
  LaneTable(const Problem& problem, std::span<const Use> uses, std::span<const Reduce> reduces);
  std::vector<LaneSpec> lanes;
  int32_t of_gathers(BundleId b) const { return gather_[b]; }
  int32_t of_reduces(BundleId b) const { return reduce_[b]; }

 private:
  std::vector<int32_t> gather_, reduce_;
};

// Sets `lane`, `issue` and `crosses`. Just in time: on a lane one transfer behind the other, as
// late as `slack` permits.
void hoist(const Problem& problem, const ShapeTable& shapes, const LaneTable& lanes,
           std::span<Gather> gathers);

// ---- reduce

// One for each kGrad and kRowsGrad.
std::vector<Reduce> find_reduces(const Problem& problem);
// Sets `lane`, `free` and `crosses`: a lane carries out one reduce after the other.
void estimate_sends(const Problem& problem, const LaneTable& lanes, std::span<Reduce> reduces);
// While the send slots take more than send_bytes the longest wait for the lane is given up. Returns
// how many.
int32_t shorten_sends(const Problem& problem, const ShapeTable& shapes, std::span<Reduce> reduces);

// ---- colour

// What holds a slot or an event from `begin` to `end`, both included.
struct Interval {
  int32_t group;  // those of different groups have nothing in common
  int32_t begin, end;
  int32_t item;
};
// Gives each the lowest number in its group that is free: as few as the intervals overlap. Sorts
// the intervals by (group, begin, end, item). Returns the number used in each of `groups`.
std::vector<int32_t> colour(std::vector<Interval>& intervals, int32_t groups,
                            std::vector<int32_t>& number_of_item);

// Slots of gathers, sends and scratch: fills slots, next, and report.classes and bytes.
void assign_slots(const Problem& problem, const ShapeTable& shapes, Plan& plan);
// Bytes of the slots that assign_slots would make, without and of scratch.
int64_t slot_bytes(const ShapeTable& shapes, std::span<const Gather> gathers,
                   std::span<const Reduce> reduces);
int64_t scratch_bytes(const Problem& problem, std::span<const Gather> gathers,
                      std::span<const Reduce> reduces);
void assign_events(const Timeline& time, Plan& plan);

// ---- report

// From the schedule, and of what is moved.
void report_times(const Problem& problem, Plan& plan);
uint64_t hash_of(const Plan& plan);

}  // namespace moiety::gtp
