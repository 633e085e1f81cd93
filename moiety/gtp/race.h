// A check that the events of a plan order everything that has to be ordered
// (docs/spec/gtp.md#edges).
//
// The plan is replayed with one vector clock for each stream: the caller's, the lanes, the peers'
// side of the lanes, the optimizer's. Recording an event copies a clock, waiting for it joins one.
// Every read of a slot, a shard or a main_grad must be behind its write, and every write behind all
// reads of the value before. Two steps are replayed, so that effects of one step on the next are
// seen; the optimizer updates the shards between them if the trace has gradients.
//
// The check assumes that the caller's streams of a step begin behind begin_step's and have joined
// flush's, and that a gradient is written on the stream that reduces it, behind a consume of its
// bundle there. A lane keeps its order over graph segments: its first operation in one waits, by an
// external event, for its last one in the segment before.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "moiety/gtp/plan.h"

namespace moiety::gtp {

enum class Edge : uint8_t {
  kNone,
  kPublished,    // E1 shard written -> gather; at G = 1, and before a gradient of a bundle that was
                 // not consumed, -> the caller's stream
  kReady,        // E2 gather -> consumer
  kRead,         // E3 last reader of a slot -> next gather into it
  kGradient,     // E4 weight gradient -> reduce
  kAccumulated,  // E5 accumulate -> optimizer
  kSent,         // E6 send slot read by everyone -> next writer
  kFlushed,  // E7 flush -> optimizer and the flush's stream; all peers' gathers -> shard written
  kBegun,    // begin_step's stream -> lanes: steps without an optimizer have no E1 between them
};

struct RaceModel {
  Edge without = Edge::kNone;          // an edge that is left out
  std::span<const int32_t> streams{};  // the caller's stream of each position; empty: all on one
};

struct Race {
  int32_t step = 0, position = 0;  // of the access that is not ordered
  std::string text;
};

// The first access, in the order of the host, that nothing orders; empty if there is none. `plan`
// is a plan of `trace`.
std::optional<Race> find_race(const Plan& plan, std::span<const TraceEvent> trace,
                              const RaceModel& model = {});

}  // namespace moiety::gtp
