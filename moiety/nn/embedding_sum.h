// The order in which gradients of an embedding are summed (docs/spec/trainer.md#backward): the
// occurrences of a token in ascending order, in blocks of 64, then the blocks' sums in ascending
// order.
#pragma once

#include <algorithm>
#include <cstdint>

namespace moiety::nn {

inline constexpr int64_t kEmbeddingBlock = 64;  // occurrences in a block

// A row and the position of one of its occurrences, in one number that sorts by row, then position.
constexpr int64_t occurrence(int64_t row, int64_t position) { return row << 32 | position; }
constexpr int64_t row_of_occurrence(int64_t o) { return o >> 32; }

// sum[i] = the sum of dout[position * ld + i] over the occurrences [begin, end) of one row, for n
// elements, in precision A; `block` is scratch of n elements.
template <class T, class A>
void sum_occurrences(const T* dout, int64_t ld, int64_t n, const int64_t* begin, const int64_t* end,
                     A* block, A* sum) {
  std::fill_n(sum, n, A(0));
  for (const int64_t* b = begin; b < end; b += kEmbeddingBlock) {
    std::fill_n(block, n, A(0));
    for (const int64_t* o = b; o < std::min(b + kEmbeddingBlock, end); ++o) {
      const T* row = dout + (*o & 0xFFFFFFFF) * ld;
      for (int64_t i = 0; i < n; ++i) block[i] += static_cast<A>(row[i]);
    }
    for (int64_t i = 0; i < n; ++i) sum[i] += block[i];
  }
}

}  // namespace moiety::nn
