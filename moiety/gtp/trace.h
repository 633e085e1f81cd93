// The running trace of a step: what the executor is asked for, in order
// (docs/spec/gtp.md#recording).
//
// A position is the index of an executor call. Bundles that one call names (a fused FC1 and FC2)
// are events of one position.
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
  kRecompute,   // in a forward pass that is run again
  kGradBuffer,  // memory for a gradient is asked for
  kGrad,        // the gradient in it is to be reduced
  kRows,        // rows of the weight are read where they lie (embedding.h),
  kRowsGrad,    // and gradients of such rows are to be reduced
  kCut,         // border of two graph segments
  kFlush,       // the last position
};
const char* name(Kind kind);

constexpr bool is_consume(Kind kind) {
  return kind == Kind::kFwd || kind == Kind::kBwd || kind == Kind::kRecompute;
}
// A call of kRowsGrad is both of the others' calls.
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
  // A consume of the same call as the event before.
  bool same_call = false;
  // Estimated work from this call to the next, from shapes; never from a clock, which would differ
  // between ranks. That of a call's later events counts too.
  float work_ns = 0;
  friend bool operator==(const TraceEvent&, const TraceEvent&) = default;
};

// Throws Error(InvalidArgument) with event, position and bundle unless the trace is empty or one of
// a whole step: kBegin first, kFlush last and nowhere else; bundles in [0, bundles); calls of
// several bundles name each once, for one purpose; every kGradBuffer is followed by the kGrad of
// its bundle before the next kGradBuffer or kRowsGrad of it, and nothing else is a kGrad; work is
// finite and not negative.
void check_trace(std::span<const TraceEvent> trace, int32_t bundles);

}  // namespace moiety::gtp
