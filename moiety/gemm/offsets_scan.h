// The one scan behind grouped_offsets, its arguments checked and resolved, and the arithmetic that
// host and device share; and what grouped_tensor.h has on GPUs. Internal to moiety/gemm.
#pragma once

#include <cstdint>
#include <limits>
#include <span>

#include "moiety/base/integer.h"
#include "moiety/base/stream.h"
#include "moiety/quant/row_groups.h"

namespace moiety::gemm {

// Integers of a tensor, int32 or int64.
struct Integers {
  void* data = nullptr;
  bool wide = false;  // int64

  MOIETY_HD_INLINE int64_t get(int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
  // Stores a value that is not negative, or the largest that fits; false if it is that or more.
  MOIETY_HD_INLINE bool put(int64_t i, int64_t value) const {
    constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
    constexpr int32_t kMostOf32 = std::numeric_limits<int32_t>::max();
    if (wide) {
      static_cast<int64_t*>(data)[i] = value;
      return value < kMost;
    }
    static_cast<int32_t*>(data)[i] = value < kMostOf32 ? static_cast<int32_t>(value) : kMostOf32;
    return value <= kMostOf32;
  }
};

// Sums and products of numbers that are not negative stay at the largest int64.
MOIETY_HD_INLINE constexpr int64_t saturating_add(int64_t a, int64_t b) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  return a > kMost - b ? kMost : a + b;
}
MOIETY_HD_INLINE constexpr int64_t saturating_mul(int64_t a, int64_t b) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  return b != 0 && a > kMost / b ? kMost : a * b;
}

inline constexpr int kMaxOffsets = 16;

struct OffsetsScan {
  struct Output {
    Integers out;
    int64_t div = 1, mul = 1;
    bool leading_zero = true;

    // The number that a group of n rows adds to an output.
    MOIETY_HD_INLINE int64_t size(int64_t n) const { return saturating_mul(ceil_div(n, div), mul); }
    // The value behind group e goes here.
    MOIETY_HD_INLINE bool put(int64_t e, int64_t total) const {
      return out.put(e + (leading_zero ? 1 : 0), total);
    }
  };
  Integers count;
  int64_t experts = 0, capacity = 0;
  Output outputs[kMaxOffsets];
  int size = 0;                // of outputs
  uint32_t* status = nullptr;  // null: nobody asks for faults

  // Whether a group of n rows fits behind `used` rows.
  MOIETY_HD_INLINE bool fits(int64_t n, int64_t used) const {
    return n >= 0 && n <= capacity - used;
  }
};

inline constexpr size_t kMaxZeroed = 4;  // buffers of one call
void grouped_offsets_cuda(const OffsetsScan& scan, std::span<const TensorView> zeroed,
                          const Stream& stream);
void zero_dead_rows_cuda(const quant::RowGroups& groups, const TensorView& rows,
                         const Stream& stream);

}  // namespace moiety::gemm
