// The trace of a step: the calls of the executor, in order (docs/spec/gtp.md#recording).
//
// A position is the index of an executor call. If one call names several bundles (a fused FC1 and
// FC2), they are events of one position.
#pragma once

#include <cstdint>
#include <span>

namespace moiety::gtp {

// Index into the bundles of an executor.
using BundleId = int32_t;
inline constexpr BundleId kNoBundle = -1;

enum class Kind : uint8_t {
  kBegin,       // position 0
  kFwd,         // a consume: the full weight is read in a forward pass,
  kBwd,         // in a backward pass (dgrad),
  kRecompute,   // or in a forward pass that is run again
  kGradBuffer,  // memory for a gradient is requested
  kGrad,        // the gradient in it is to be reduced
  kRows,        // rows of the weight are read where they lie (embedding.h)
  kRowsGrad,    // gradients of such rows are to be reduced
  kCut,         // border of two graph segments
  kFlush,       // the last position
};
const char* name(Kind kind);

constexpr bool is_consume(Kind kind) {
  return kind == Kind::kFwd || kind == Kind::kBwd || kind == Kind::kRecompute;
}
// Whether a call begins a gradient. A kRowsGrad is both of the other kinds' calls at once.
constexpr bool begins_gradient(Kind kind) {
  return kind == Kind::kGradBuffer || kind == Kind::kRowsGrad;
}
constexpr bool ends_gradient(Kind kind) { return kind == Kind::kGrad || kind == Kind::kRowsGrad; }
constexpr bool names_bundle(Kind kind) {
  return is_consume(kind) || begins_gradient(kind) || ends_gradient(kind) || kind == Kind::kRows;
}

struct TraceEvent {
  Kind kind = Kind::kBegin;
  BundleId bundle = kNoBundle;
  // Whether the event is a consume of the same call as the event before.
  bool same_call = false;
  // Estimated work from this call to the next, computed from shapes and never read from a clock,
  // which would differ between ranks. The work of a call's later events counts too.
  float work_ns = 0;
  friend bool operator==(const TraceEvent&, const TraceEvent&) = default;
};

// Throws Error(kInvalidArgument) with event, position and bundle unless the trace is empty or
// describes a whole step: kBegin is first, kFlush is last, and neither is anywhere else; bundles
// are in [0, bundles); a call of several bundles names each once, for one purpose; every
// kGradBuffer is followed by the kGrad of its bundle before the next kGradBuffer or kRowsGrad of
// it, and nothing else is a kGrad; work is finite and not negative.
void check_trace(std::span<const TraceEvent> trace, int32_t bundles);

}  // namespace moiety::gtp
