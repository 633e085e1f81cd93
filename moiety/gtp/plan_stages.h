// The stages of `plan`. Internal to moiety/gtp; the contract is in plan.h.
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
  int32_t segment_end(int32_t p) const;  // last position of its segment

  std::span<const TraceEvent> trace;
  int32_t positions = 0;
  std::vector<int32_t> first;    // [positions + 1]: first event of a position
  std::vector<double> t;         // [positions + 1]: work before the position, ns
  std::vector<int32_t> segment;  // [positions]: cuts at or before it, since a cut opens its segment
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
// The uses, ordered by position and bundle.
std::vector<Use> demand(const Problem& problem);
// The uses whose gather is kept for their `next`, in the order in which they were accepted: by span
// and position. A prefix of the list is within the same limits.
std::vector<int32_t> coalesce(const Problem& problem, std::span<const Use> uses);
// One gather for each run of kept uses, in order of first use; `gather_of` has the gather of each
// use.
std::vector<Gather> gathers_of(std::span<const Use> uses, std::span<const int32_t> kept,
                               std::vector<int32_t>& gather_of);

// ---- hoist

// The shapes of gathers and sends; the budget may lower a shape's look-ahead.
class ShapeTable {
 public:
  ShapeTable(std::span<const BundleSpec> bundles, const Policy& policy);
  struct Shape {
    SlotSpec slot;  // crosses is false
    int ahead = 0;  // look-ahead of gathers
  };
  std::vector<Shape> shapes;  // ascending
  int32_t of(const Gather& g) const { return gather_[3 * g.bundle + g.views - 1]; }
  int32_t of(const Reduce& r) const { return send_[2 * r.bundle + r.by_rows]; }

 private:
  std::vector<int32_t> gather_, send_;
};

// The lanes that have operations, by group, class and purpose.
class LaneTable {
 public:
  LaneTable(const Problem& problem, std::span<const Use> uses, std::span<const Reduce> reduces);
  std::vector<LaneSpec> lanes;
  int32_t of_gathers(BundleId b) const { return gather_[b]; }
  int32_t of_reduces(BundleId b) const { return reduce_[b]; }

 private:
  std::vector<int32_t> gather_, reduce_;
};

// Sets `lane`, `issue` and `crosses`. Gathers are issued just in time: one transfer behind the
// other on a lane, as late as `slack` permits.
void hoist(const Problem& problem, const ShapeTable& shapes, const LaneTable& lanes,
           std::span<Gather> gathers);

// ---- reduce

// The reduces, one for each kGrad and kRowsGrad.
std::vector<Reduce> find_reduces(const Problem& problem);
// Sets `lane`, `free` and `crosses`; a lane carries out one reduce after the other.
void estimate_sends(const Problem& problem, const LaneTable& lanes, std::span<Reduce> reduces);
// Gives up the longest waits for the lane while the send slots take more than send_bytes. Returns
// how many were given up.
int32_t shorten_sends(const Problem& problem, const ShapeTable& shapes, std::span<Reduce> reduces);

// ---- colour

// The time in which something holds a slot or an event, from `begin` to `end`, both included.
struct Interval {
  int32_t group;  // intervals of different groups have nothing in common
  int32_t begin, end;
  int32_t item;
};
// Gives each interval the lowest number that is free in its group, which takes as few as overlap.
// Sorts the intervals by (group, begin, end, item). Returns the number used in each of `groups`.
std::vector<int32_t> colour(std::vector<Interval>& intervals, int32_t groups,
                            std::vector<int32_t>& number_of_item);

// Assigns slots to gathers, sends and scratch: fills slots, next, and report.classes and bytes.
void assign_slots(const Problem& problem, const ShapeTable& shapes, Plan& plan);
// The bytes of the slots that assign_slots would make: of gathers and sends, and of scratch.
int64_t slot_bytes(const ShapeTable& shapes, std::span<const Gather> gathers,
                   std::span<const Reduce> reduces);
int64_t scratch_bytes(const Problem& problem, std::span<const Gather> gathers,
                      std::span<const Reduce> reduces);
void assign_events(const Timeline& time, Plan& plan);

// ---- report

// Fills the report from the schedule and the bytes that are moved.
void report_times(const Problem& problem, Plan& plan);
uint64_t hash_of(const Plan& plan);

}  // namespace moiety::gtp
