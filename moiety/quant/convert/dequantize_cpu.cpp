// Dequantization on CPUs, in row segments of 1024 elements. Operands whose products are BF16
// values, which is nearly all of them, are decoded in pairs and cut; anything else is computed in
// float32 and rounded.
#include <algorithm>
#include <cstring>

#include "moiety/base/integer.h"
#include "moiety/base/parallel.h"
#include "moiety/formats/bf16.h"
#include "moiety/formats/e2m1.h"
#include "moiety/formats/e4m3.h"
#include "moiety/formats/e5m2.h"
#include "moiety/formats/ue8m0.h"
#include "moiety/quant/convert/dequantize_job.h"
#include "moiety/quant/hadamard.h"
#include "moiety/quant/quantize/ieee_scope.h"
#include "moiety/quant/quantize/quantize_loops.h"
#include "moiety/quant/quantize/stream_bytes.h"

namespace moiety::quant {
namespace {

constexpr int64_t kSegment = 1024;
constexpr int64_t kTaskElements = 1 << 16;

template <class F>
MOIETY_INLINE void decode_codes(const uint8_t* __restrict codes, int64_t n, float* __restrict out) {
  for (int64_t i = 0; i < n; ++i) out[i] = F::decode(codes[i]);
}
MOIETY_INLINE void decode_pairs(const uint8_t* __restrict pairs, int64_t n, float* __restrict out) {
  alignas(64) uint8_t codes[kSegment];
  for (int64_t i = 0; i < (n + 1) / 2; ++i) {
    codes[2 * i] = E2M1::unpack(pairs[i], false);
    codes[2 * i + 1] = E2M1::unpack(pairs[i], true);
  }
  decode_codes<E2M1>(codes, n, out);
}

// Loads the scales of the blocks of elements [c, c + n) of row r, in order; returns their number.
MOIETY_INLINE int64_t load_scales(const DequantizeJob& job, int64_t r, int64_t c, int64_t n,
                                  float* __restrict out) {
  const int64_t blocks = ceil_div(n, job.block_cols);
  const int64_t first = r / job.block_rows * job.row_stride + c / job.block_cols * job.col_stride;
  if (is_fp8_block(job.spec.format)) {
    const float* from = static_cast<const float*>(job.scales) + first;
    for (int64_t b = 0; b < blocks; ++b) out[b] = from[b * job.col_stride];
    return blocks;
  }
  const uint8_t* from = static_cast<const uint8_t*>(job.scales) + first;
  alignas(64) uint8_t copy[kSegment];
  const uint8_t* codes = job.col_stride == 1 ? from : copy;
  for (int64_t b = 0; codes == copy && b < blocks; ++b) copy[b] = from[b * job.col_stride];
  if (is_fp4(job.spec.format)) {
    decode_codes<E4M3>(codes, blocks, out);
  } else {
    decode_codes<UE8M0>(codes, blocks, out);
  }
  return blocks;
}

template <int kBlock>
MOIETY_INLINE void multiply_blocks(const float* __restrict scales, int64_t blocks,
                                   float* __restrict values) {
  for (int64_t b = 0; b < blocks; ++b) {
    // If this loop were not unrolled, the loop around it would be vectorized instead, with
    // shuffles.
#pragma GCC unroll 1
    for (int i = 0; i < kBlock; ++i) values[b * kBlock + i] *= scales[b];
  }
}

// Computes elements [c, c + n) of row r, before they are stored; up to 1024 are computed.
MOIETY_INLINE void segment(const DequantizeJob& job, int64_t r, int64_t c, int64_t n,
                           float* __restrict values) {
  const uint8_t* row = job.codes + r * job.pitch;
  if (job.spec.element == DType::kE2M1) {
    decode_pairs(row + c / 2, n, values);
  } else if (job.spec.element == DType::kE5M2) {
    decode_codes<E5M2>(row + c, n, values);
  } else {
    decode_codes<E4M3>(row + c, n, values);
  }
  if (job.scales) {
    alignas(64) float scales[kSegment];
    const int64_t blocks = load_scales(job, r, c, n, scales);
    if (job.block_cols == 16) multiply_blocks<16>(scales, blocks, values);
    if (job.block_cols == 32) multiply_blocks<32>(scales, blocks, values);
    if (job.block_cols == 128) multiply_blocks<128>(scales, blocks, values);
    if (job.block_cols == 1) multiply_blocks<1>(scales, blocks, values);
  }
  if (!job.tensor_scale) return;
  const float g = job.tensor_scale[r * job.tensor_stride];
  for (int64_t i = 0; i < n; ++i) values[i] *= g;
}

// Scales whose products with all codes are BF16 values (docs/spec/formats.md#operands).
struct ExactScales {
  uint32_t least, most;  // bits of |scale|
  uint32_t zeros;        // bits of the mantissa that a scale must not have

  static constexpr ExactScales of(DType element) {
    if (element == DType::kE2M1) return {0, std::bit_cast<uint32_t>(E4M3::kMax), 0x000FFFFFu};
    if (element == DType::kE5M2) return {10u << 23, 239u << 23, 0x007FFFFFu};
    return {3u << 23, 246u << 23, 0x007FFFFFu};
  }
  MOIETY_INLINE bool hold(const float* __restrict scales, int64_t n) const {
    uint32_t bad = 0;
    for (int64_t b = 0; b < n; ++b) {
      const uint32_t s = abs_bits(scales[b]);
      bad |= static_cast<uint32_t>(s < least) | static_cast<uint32_t>(s > most) | (s & zeros);
    }
    return bad == 0;
  }
};

// Loads scales and returns their number, or -1 if not all are exact.
MOIETY_SIMD_CLONES int64_t load_exact_scales(const DequantizeJob& job, const ExactScales& exact,
                                             int64_t r, int64_t c, int64_t n, float* out) {
  const int64_t blocks = load_scales(job, r, c, n, out);
  return exact.hold(out, blocks) ? blocks : -1;
}

// The codes of a pair: two bytes, or the nibbles of one byte.
MOIETY_INLINE uint32_t load_pair(const uint8_t* codes, int64_t i, E2M1) { return codes[i]; }
template <class F>
MOIETY_INLINE uint32_t load_pair(const uint8_t* codes, int64_t i, F) {
  using Word __attribute__((aligned(1), may_alias)) = uint16_t;
  return reinterpret_cast<const Word*>(codes)[i];
}

// Writes the BF16 values of pairs, from products that have no more bits than those. Returns false,
// with nothing written, if a code is no number.
template <class F>
MOIETY_INLINE bool exact_pairs(const uint8_t* __restrict codes, const float* __restrict even,
                               const float* __restrict odd, int64_t pairs,
                               uint32_t* __restrict out) {
  constexpr int kBits = std::bit_width(F::kSignBit);
  uint8_t largest = 0;
  for (int64_t i = 0; kBits == 8 && i < 2 * pairs; ++i) {
    const auto magnitude = static_cast<uint8_t>(codes[i] & 0x7F);
    largest = magnitude > largest ? magnitude : largest;
  }
  if (largest > F::kMaxCode) return false;
  for (int64_t i = 0; i < pairs; ++i) {
    const uint32_t w = load_pair(codes, i, F());
    const float a = F::decode_finite(w) * even[i];
    const float b = F::decode_finite(w >> kBits) * odd[i];
    out[i] = std::bit_cast<uint32_t>(a) >> 16 | (std::bit_cast<uint32_t>(b) & 0xFFFF0000u);
  }
  return true;
}
#define MOIETY_EXACT_PAIRS(F)                                                               \
  MOIETY_SIMD_CLONES bool exact_##F(const uint8_t* codes, const loops::PairFactors& scales, \
                                    int64_t pairs, uint32_t* out) {                         \
    return exact_pairs<F>(codes, scales.even, scales.odd, pairs, out);                      \
  }
MOIETY_EXACT_PAIRS(E2M1)
MOIETY_EXACT_PAIRS(E4M3)
MOIETY_EXACT_PAIRS(E5M2)
#undef MOIETY_EXACT_PAIRS

// Dequantizes operands where that is exact; elsewhere returns false, with nothing written.
class ExactRows {
 public:
  explicit ExactRows(const DequantizeJob& job)
      : possible_(job.what == Dequantized::kOperand && !job.undo_rht),
        exact_(ExactScales::of(job.spec.element)),
        pairs_(job.spec.element == DType::kE2M1   ? exact_E2M1
               : job.spec.element == DType::kE5M2 ? exact_E5M2
                                                  : exact_E4M3) {
    std::fill(std::begin(even_), std::end(even_), 1.0f);
  }

  // Elements [c, c + n) of row r; n is even.
  MOIETY_INLINE bool segment(const DequantizeJob& job, int64_t r, int64_t c, int64_t n,
                             uint32_t* out) {
    if (!possible_) return false;
    loops::PairFactors factors{even_, even_};
    if (job.scales) {
      const int64_t blocks = load_exact_scales(job, exact_, r, c, n, scales_);
      if (blocks < 0) return false;
      if (job.block_cols == 1) {
        loops::split(scales_, n, even_, odd_);
        factors.odd = odd_;
      } else {
        loops::spread(scales_, static_cast<int>(job.block_cols), blocks, even_);
      }
    }
    const int64_t at = job.spec.element == DType::kE2M1 ? c / 2 : c;
    return pairs_(job.codes + r * job.pitch + at, factors, n / 2, out);
  }

 private:
  bool possible_;
  ExactScales exact_;
  bool (*pairs_)(const uint8_t*, const loops::PairFactors&, int64_t, uint32_t*);
  alignas(64) float scales_[kSegment], even_[kSegment / 2], odd_[kSegment / 2];
};

// Elements [c, c + n) of row r as they are stored.
MOIETY_SIMD_CLONES void general_segment(const DequantizeJob& job, int64_t r, int64_t c, int64_t n,
                                        void* out) {
  alignas(64) float values[kSegment] = {};
  // A block of 16 that was rotated is needed whole.
  segment(job, r, c, job.undo_rht ? round_up(n, 16) : n, values);
  for (int64_t i = 0; job.undo_rht && i < n; i += 16) {
    undo_rht(*reinterpret_cast<float(*)[16]>(values + i), job.spec.rht_signs);
  }
  if (job.dtype == DType::kBFloat16) {
    bf16* to = static_cast<bf16*>(out);
    for (int64_t i = 0; i < n; ++i) to[i] = bf16(values[i]);
  } else {
    float* to = static_cast<float*>(out);
    for (int64_t i = 0; i < n; ++i) to[i] = canonical(values[i]);
  }
}

void dequantize_rows(const DequantizeJob& job, int64_t begin, int64_t end) {
  const ByteWriter writer(byte_size(job.dtype, job.rows * job.out_stride));
  ExactRows exact(job);
  alignas(64) uint32_t out[kSegment];
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t c = 0; c < job.out_cols; c += kSegment) {
      const int64_t n = std::min(kSegment, job.out_cols - c);
      if (n % 2 != 0 || !exact.segment(job, r, c, n, out)) general_segment(job, r, c, n, out);
      auto* to = static_cast<std::byte*>(job.out) + byte_size(job.dtype, r * job.out_stride + c);
      writer.write(to, out, byte_size(job.dtype, n));
    }
  }
  ByteWriter::finish();
}

}  // namespace

void dequantize_cpu(const DequantizeJob& job) {
  const int64_t rows = std::max<int64_t>(1, kTaskElements / std::max<int64_t>(1, job.out_cols));
  parallel_for(job.rows, rows, [&](int64_t begin, int64_t end) {
    const IeeeScope scope;
    dequantize_rows(job, begin, end);
  });
}

}  // namespace moiety::quant
