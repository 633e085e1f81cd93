// What ranks on GPUs tell each other when they meet in an operation: which one it is, in a form that
// kernels compare, and the word that says how often the two have met.
//
// Two ranks of a group count their meetings, from 1; both counts are equal. A rank's word carries
// its count and a signature of its call. A rank goes on when the peer's word has its own count, so
// it can be at most one meeting ahead of a peer: two places for words, by the parity of the count,
// are enough, and nothing is ever reset.
#pragma once

#include <cstdint>

#include "moiety/base/host_device.h"

namespace moiety::comm::mapped {

inline constexpr int kMaxRanks = 64;
inline constexpr int kSignatureBits = 20;

// A call of a collective as one of its pairs of ranks sees it; equal on both if the calls fit.
struct PairCall {
  uint32_t kind = 0;     // Collective, dtype and ReduceOp, a byte each
  int32_t root = 0;      // of a broadcast
  int64_t elements = 0;  // CollectiveCall::elements
  int64_t place = 0;     // where the operand lies: 0 for anywhere, else the buffer and the offset
  int64_t up = 0, down = 0;  // rows of all_to_all from the lower rank to the higher, and back

  friend bool operator==(const PairCall&, const PairCall&) = default;
};

MOIETY_HD_INLINE uint32_t pack_kind(uint32_t collective, uint32_t dtype, uint32_t op) {
  return collective | dtype << 8 | op << 16;
}

MOIETY_HD_INLINE uint64_t mix_bits(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// 20 bits that differ for different calls, but for one pair in a million.
MOIETY_HD_INLINE uint32_t signature(const PairCall& call) {
  uint64_t h = mix_bits(call.kind + (uint64_t(uint32_t(call.root)) << 32) + 1);
  h = mix_bits(h ^ uint64_t(call.elements));
  h = mix_bits(h ^ uint64_t(call.place));
  h = mix_bits(h ^ uint64_t(call.up));
  h = mix_bits(h + uint64_t(call.down));
  return uint32_t(h) & ((1u << kSignatureBits) - 1);
}

MOIETY_HD_INLINE uint64_t make_word(uint64_t count, uint32_t sign) {
  return count << kSignatureBits | sign;
}
MOIETY_HD_INLINE uint64_t count_of(uint64_t word) { return word >> kSignatureBits; }
MOIETY_HD_INLINE uint32_t signature_of(uint64_t word) {
  return uint32_t(word) & ((1u << kSignatureBits) - 1);
}
MOIETY_HD_INLINE int parity(uint64_t count) { return int(count & 1); }

// What two ranks tell each other, by the rank in whose memory it lies: the word that the peer left
// there, and the call that it made itself, which the peer reads if the word is not that of its own.
struct alignas(64) Post {
  uint64_t word;
  PairCall call;
};
static_assert(sizeof(Post) == 64);

// Why an operation failed.
enum class FaultKind : uint32_t { kNone, kLate, kMismatch, kAborted };

// What a rank knows of a failure, for the text of its error.
struct Fault {
  FaultKind kind;
  int32_t rank, peer;    // the rank that found it, and the one it waited for
  uint64_t operation;    // of the group, from 1
  uint64_t count, word;  // the meeting it waited for, and the peer's word
  uint64_t nanoseconds;
  PairCall mine, theirs;
};

// A rank's own counts, zero at first. They only grow, in the order of the stream, so a graph that is
// replayed needs no new numbers.
struct Control {
  uint64_t counts[kMaxRanks];  // of meetings, by peer
  uint64_t operation;          // of operations
  uint64_t waited_ns;          // in all meetings
  uint32_t fault_taken;        // 1 when a fault has been found; the first one is told
  uint32_t finished;           // blocks of a kernel that is under way
  uint32_t drawn;              // pieces of its work that warps have taken
};

// Where the parts of a rank's memory begin; equal on all ranks. Peers write and read all but the
// first and the last one.
struct Places {
  int64_t control = 0;  // Control
  int64_t posts = 0;    // Post[ranks][2]
  int64_t poison = 0;   // u64: 1 + the rank whose fault it is; then Fault[ranks]
  int64_t faults = 0;
  int64_t exchange = 0;  // bytes[ranks][2][small]
  int64_t small = 0;
  int64_t staging = 0;  // two halves
  int64_t half = 0;
  int64_t landing = -1;  // a half, where copies bring what is summed; -1 where kernels read peers
  int64_t bytes = 0;     // of all
};

MOIETY_HD_INLINE int64_t post_at(const Places& places, int from, uint64_t count) {
  return places.posts + (2 * from + parity(count)) * int64_t(sizeof(Post));
}
MOIETY_HD_INLINE int64_t exchange_at(const Places& places, int from, uint64_t count) {
  return places.exchange + (2 * from + parity(count)) * places.small;
}

}  // namespace moiety::comm::mapped
