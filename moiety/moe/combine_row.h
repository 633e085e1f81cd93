// Operations of the CPU's movers on single rows: sums in the defined order
// (docs/spec/ep.md#rows-and-sums), products and dot products. Rows are bfloat16, float16 or float32
// of any alignment that suits their dtype; arithmetic is in fp32.
#pragma once

#include <bit>
#include <cstring>

#include "moiety/base/dtype.h"
#include "moiety/moe/exchange.h"

namespace moiety::moe {

constexpr int64_t element_bytes(DType type) { return bits(type) / 8; }

inline uint32_t load32(const std::byte* p) {
  uint32_t out;
  std::memcpy(&out, p, 4);
  return out;
}
inline void store32(std::byte* p, uint32_t value) { std::memcpy(p, &value, 4); }
inline float load_float(const std::byte* p) { return std::bit_cast<float>(load32(p)); }

struct Term {
  const std::byte* row;
  DType type;
  float weight;
};

// The terms of a sum, at most one per choice, hence per rank. They are on the stack and not
// initialized in vain.
class Terms {
 public:
  explicit Terms(bool weighted) : weighted_(weighted) {}
  void add(const Term& term) { term_[count_++] = term; }
  int count() const { return count_; }
  const Term& operator[](int i) const { return term_[i]; }
  // The number of terms from i on that are summed in one pass.
  int run(int i) const {
    int same = 1;
    while (!weighted_ && same < 4 && i + same < count_ && term_[i + same].type == term_[i].type)
      ++same;
    return same == 3 ? 2 : same;
  }
  bool weighted() const { return weighted_; }

 private:
  bool weighted_;
  int count_ = 0;
  Term term_[kMaxTopk];
};

// out := the first term, then the others in their order, then the addend (null: none), rounded
// once. Without any of them it is +0.
void sum_terms(const Terms& terms, const std::byte* addend, DType addend_type, std::byte* out,
               DType out_type, int64_t n);

// Copies a term that is the whole sum, so it keeps its bytes; on the wire it may have become fp32,
// exactly.
void copy_term(const Term& term, std::byte* out, DType out_type, int64_t n);

// out := round(weight x).
void scale_row(DType type, float weight, const std::byte* x, std::byte* out, int64_t n);
// The dot product of two rows in the order of lane_sum.
float dot_row(DType type, const std::byte* x, const std::byte* y, int64_t n);

}  // namespace moiety::moe
