// The plan of a step, made from its trace (docs/spec/gtp.md#planner): the gathers and reduces, the
// places in the step where they are issued, their lanes, and their slots of memory.
//
// `plan` is a pure function: it knows neither rank nor device, so every rank of a group makes the
// same plan, which the hash shows. Estimates of time decide only where a transfer begins; events
// decide correctness. The plan holds positions of the trace; the executor walks it:
//
//   call at position p   records the read events of the gathers used at p - 1 that have one (E3);
//                        waits for the ready events of waits[p] (E2); then issues issues[p], each
//                        behind the read events of its slot's occupant before (E3)
//   kGradBuffer at p     waits for the event of the reduce before in the slot (E6); kRowsGrad too
//
// A slot's use in an earlier step has ended at kBegin, where the lanes wait for begin_step's
// stream.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "moiety/gtp/trace.h"

namespace moiety::gtp {

// The two ways in which a GEMM reads a weight, and the two payloads of a gather. kRow is for
// forward and recompute, kCol for backward (dgrad). Formats whose codes are equal in both views
// have one payload, kRow, from which either view is made.
enum class Payload : uint8_t { kRow, kCol };
using Views = uint8_t;  // a set of views
inline constexpr Views kRowView = 1, kColView = 2;

// The facts about a bundle that the planner needs.
struct BundleSpec {
  // One operation: bytes received from peers, memory in its slot until its last use, and memory for
  // the time of the operation only.
  struct Transfer {
    int64_t received = 0, slot = 0, scratch = 0;
  };

  std::string name;    // for errors
  int group = 0;       // peers that share the shards; lanes and slots belong to one
  int group_size = 1;  // G; at 1 nothing is moved
  bool expert = false;
  bool one_payload = true;
  bool rows_only = false;            // dgrad reads the row view too
  std::array<Transfer, 3> gather{};  // gathers that make the row view, the column view, both
  Transfer reduce{};                 // the slot is the send buffer
  // The traffic of kRows and kRowsGrad, which move rows instead of the whole weight (embedding.h).
  struct Rows {
    int64_t tokens = 0;  // most tokens of a call; 0: there are no such calls
    int64_t lookup = 0;  // bytes received if the tokens are spread evenly over the ranks
    Transfer reduce{};   // at most this much is received
  };
  Rows rows{};

  const Transfer& gather_of(Views views) const { return gather[views - 1]; }
  const Transfer& reduce_of(bool by_rows) const { return by_rows ? rows.reduce : reduce; }
  // The view that a consume reads.
  Views view_of(Kind consume) const {
    return consume == Kind::kBwd && !rows_only ? kColView : kRowView;
  }
};

struct Policy {
  // Rates of work: the time of a call is the larger of its flops and bytes over these (recorder.h).
  double flops_per_ns = 500e3;
  double memory_bytes_per_ns = 3000;
  double latency_ns = 20e3;   // of a transfer
  double bytes_per_ns = 300;  // rate at which bytes are received
  double slack = 1.25;        // factor on transfer times when gathers are placed
  // The most positions that a gather may be issued before its first use.
  int max_ahead_dense = 8, max_ahead_expert = 64;
  // A gather is kept for the next use if that is at most this many positions away, while all that
  // is kept takes at most keep_bytes.
  int keep_span = 2;
  int64_t keep_bytes = std::numeric_limits<int64_t>::max();
  // limit of send slots, where time allows
  int64_t send_bytes = std::numeric_limits<int64_t>::max();
  int64_t slot_bytes = std::numeric_limits<int64_t>::max();  // limit of all slots
  // If false, no gather is issued or kept, and no send slot waited for, across a kCut.
  bool cross_cuts = true;

  // A policy for a device: 15 % of its memory for slots, and half of that each to keep and to send.
  static Policy for_memory(int64_t device_bytes);
};

// A range of items for each position.
struct PerPosition {
  std::vector<int32_t> begin;  // [positions + 1]
  std::vector<int32_t> items;
  std::span<const int32_t> operator[](int32_t p) const {
    return {items.data() + begin[p], static_cast<size_t>(begin[p + 1] - begin[p])};
  }
};

inline constexpr int32_t kNone = -1;

struct Gather {
  BundleId bundle = kNoBundle;
  Payload payload = Payload::kRow;
  Views views = 0;  // views that `finish` makes: those of the uses
  // the bundle's first gather in the step: waits until the shard is there (E1)
  bool publishes = false;
  bool crosses = false;  // is read in a later graph segment than it is issued in
  int32_t issue = 0, first_use = 0, last_use = 0;  // positions
  int32_t lane = kNone, slot = kNone;
  int32_t next = kNone;         // the gather that takes the slot over in this step
  int32_t ready_event = kNone;  // E2
  int32_t read_event = kNone;   // E3, one on every stream that reads; none without `next`
};

// One for every kGrad and kRowsGrad. If G is 1, lane and slot are kNone, the buffer is main_grad,
// and `next` is the reduce that adds to it after this one.
struct Reduce {
  BundleId bundle = kNoBundle;
  bool by_rows = false;
  bool first = false, last = false;  // overwrites main_grad; reports the weights ready
  bool crosses = false;
  int32_t buffer = 0, grad = 0;  // positions of kGradBuffer and kGrad; both are that of kRowsGrad
  int32_t free = 0;              // the last position before the slot has another occupant
  int32_t lane = kNone, slot = kNone;
  int32_t next = kNone;   // the reduce that takes the slot over in this step
  int32_t event = kNone;  // E6; none without `next`
};

// The operations of one group and class, in order of issue, on a stream of their own.
struct LaneSpec {
  int group = 0;
  bool expert = false, reduces = false;
  int32_t scratch = kNone;  // slot
};

enum class SlotUse : uint8_t { kGather, kSend, kScratch };
const char* name(SlotUse use);

// A slot. Slots with equal specs are a class: an item that may lie in one may lie in all of them.
struct SlotSpec {
  SlotUse use = SlotUse::kGather;
  int group = 0;
  bool expert = false;
  bool crosses = false;
  int64_t bytes = 0;
  friend auto operator<=>(const SlotSpec&, const SlotSpec&) = default;
};

struct Report {
  struct Class {
    SlotSpec slot;
    int32_t count = 0;
    int64_t bytes() const { return count * slot.bytes; }
  };
  std::vector<Class> classes;
  int64_t bytes = 0;          // bytes of all slots
  int32_t merges = 0;         // uses served by an earlier gather
  int32_t undone = 0;         // merges given up for the budget
  int32_t crossings = 0;      // operations
  int32_t shortened = 0;      // sends that give their slot up early for send_bytes
  int64_t received = 0;       // bytes in a step
  double work_ns = 0;         // work of the step
  double gather_wait_ns = 0;  // simulated waits of consumers for gathers and rows,
  double send_wait_ns = 0;    // of writers of gradients for send slots,
  double flush_wait_ns = 0;   // and of the end of the step for reduces
};

struct Plan {
  int32_t positions = 0;
  std::vector<Gather> gathers;  // in order of first use
  std::vector<Reduce> reduces;  // in order of `grad`
  std::vector<LaneSpec> lanes;
  std::vector<SlotSpec> slots;
  PerPosition waits, issues;       // gathers; issues in the order of the host
  std::vector<int32_t> reduce_at;  // [positions]: the reduce of a gradient's calls, else kNone
  // Events [0, events), of which those from `external` on pass from one graph segment to another.
  int32_t events = 0, external = 0;
  Report report;
  uint64_t hash = 0;  // of everything above except the report
};

// Makes the plan. Throws Error(kInvalidArgument) for a faulty trace or bundle, and if slot_bytes
// does not hold even the smallest plan (naming needed and allowed bytes and the three largest
// classes). The result has passed check_plan.
Plan plan(std::span<const TraceEvent> trace, std::span<const BundleSpec> bundles,
          const Policy& policy);

// The estimated times of everything in the plan, by the policy's rates: the calls' work and the
// lanes run beside each other, a lane one transfer after the other. Nanoseconds from the step's
// begin.
struct Schedule {
  struct Span {
    double begin = 0, end = 0;
  };
  std::vector<Span> work;              // by position, up to the next call
  std::vector<Span> gathers, reduces;  // of plan.gathers and plan.reduces; empty if G = 1
  double gather_wait = 0, send_wait = 0, flush_wait = 0;  // as in the report
};
Schedule simulate(const Plan& plan, std::span<const TraceEvent> trace,
                  std::span<const BundleSpec> bundles, const Policy& policy);

// The first of the invariants I1 to I10 (docs/spec/gtp.md#invariants) that `plan` breaks, in words;
// empty if it is sound. It is computed from the trace anew.
std::optional<std::string> check_plan(const Plan& plan, std::span<const TraceEvent> trace,
                                      std::span<const BundleSpec> bundles, const Policy& policy);

}  // namespace moiety::gtp
