// A 64-bit digest of integers, the same on every rank, which ranks compare instead of plans and
// traces. Not for hostile input.
#pragma once

#include <cstdint>

namespace moiety::gtp {

class Hash {
 public:
  template <class... Ints>
  void add(Ints... values) {
    (add_one(static_cast<uint64_t>(values)), ...);
  }
  uint64_t value() const { return state_; }

 private:
  // A step of splitmix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
  // OOPSLA 2014) over the numbers added so far.
  void add_one(uint64_t v) {
    uint64_t z = state_ + 0x9E3779B97F4A7C15u + v;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    state_ = z ^ (z >> 31);
  }
  uint64_t state_ = 0;
};

}  // namespace moiety::gtp
