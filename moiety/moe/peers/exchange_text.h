// What ranks that map each other's memory say of a fault: the words that carry it, and the
// sentences that CPU ranks and GPU ranks have in common (docs/spec/ep.md#waits-poison-and-errors).
#pragma once

#include <string>

#include "moiety/moe/exchange.h"

namespace moiety::moe {

// What a rank waits for: an entry or a credit (chunk -1), a chunk, or prepare's head (of 0).
struct Awaited {
  int from;
  int64_t chunk = -1, of = 0;
};

// A wait that came to its deadline.
struct LateWait {
  int rank;
  Awaited awaited;
  uint64_t entered;       // word of the operation that waited
  uint64_t word, newest;  // the word that it saw; the last head of the rank it waited for
  Epoch wanted;           // of the word's bits from `shift` on
  int shift;              // 0: a credit
};

// The poison word: {failure, origin, about, epoch}.
MOIETY_HD_INLINE uint64_t poison_word(Failure failure, int origin, int about, Epoch epoch) {
  return static_cast<uint64_t>(failure) | uint64_t(origin) << 3 | uint64_t(about) << 13 |
         uint64_t(epoch) << 23;
}
MOIETY_HD_INLINE int origin_of(uint64_t poison) { return static_cast<int>(poison >> 3 & 1023); }

// "dispatch(bf16, 14336 B, weights) of plan 811".
std::string describe(const Entry& entry);
// "ep, group "moe", epoch 812: rank 3 runs ..., rank 1 runs ...".
std::string mismatch_text(const std::string& group, int rank, const Entry& entry, int peer,
                          const Entry& peers);
// "ep dispatch, group "moe", epoch 812: rank 3 waited 100.0 s for rank 1, chunk 17 of 58 (...)".
std::string late_text(const std::string& group, double seconds, const LateWait& late);
// The text for a rank that was stopped by `poison`; of a mismatch, whose entries are `reason`, it
// is that of the rank that noticed.
std::string stopped_text(const std::string& group, uint64_t poison, const uint64_t* reason);

}  // namespace moiety::moe
