// Rows in segments of 512 elements: decode, then scales spread over their blocks, then the
// products.
#include <algorithm>

#include "moiety/base/parallel.h"
#include "moiety/formats/bf16.h"
#include "moiety/formats/e2m1.h"
#include "moiety/formats/e4m3.h"
#include "moiety/formats/e5m2.h"
#include "moiety/formats/ue8m0.h"
#include "moiety/quant/dequantize_job.h"
#include "moiety/quant/hadamard.h"
#include "moiety/quant/ieee_scope.h"

namespace moiety::quant {
namespace {

constexpr int64_t kSegment = 512;
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

// Scales of the segment's blocks, one after the other.
MOIETY_INLINE void load_scales(const DequantizeJob& job, int64_t first, int64_t blocks,
                               float* __restrict out) {
  if (is_fp8_block(job.spec.format)) {
    const float* from = static_cast<const float*>(job.scales) + first;
    for (int64_t b = 0; b < blocks; ++b) out[b] = from[b * job.col_stride];
    return;
  }
  const uint8_t* from = static_cast<const uint8_t*>(job.scales) + first;
  alignas(64) uint8_t codes[kSegment];
  for (int64_t b = 0; b < blocks; ++b) codes[b] = from[b * job.col_stride];
  if (is_fp4(job.spec.format)) {
    decode_codes<E4M3>(codes, blocks, out);
  } else {
    decode_codes<UE8M0>(codes, blocks, out);
  }
}

template <int kBlock>
MOIETY_INLINE void multiply_blocks(const float* __restrict scales, int64_t blocks,
                                   float* __restrict values) {
  for (int64_t b = 0; b < blocks; ++b) {
    // Unrolled, the loop around it would be vectorized instead, with shuffles.
#pragma GCC unroll 1
    for (int i = 0; i < kBlock; ++i) values[b * kBlock + i] *= scales[b];
  }
}

// Elements [c, c + n) of row r, before they are stored; up to 512 are computed.
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
    const int64_t blocks = (n + job.block_cols - 1) / job.block_cols;
    load_scales(job, r / job.block_rows * job.row_stride + c / job.block_cols * job.col_stride,
                blocks, scales);
    if (job.block_cols == 16) multiply_blocks<16>(scales, blocks, values);
    if (job.block_cols == 32) multiply_blocks<32>(scales, blocks, values);
    if (job.block_cols == 128) multiply_blocks<128>(scales, blocks, values);
    if (job.block_cols == 1) multiply_blocks<1>(scales, blocks, values);
  }
  if (!job.tensor_scale) return;
  const float g = job.tensor_scale[r * job.tensor_stride];
  for (int64_t i = 0; i < n; ++i) values[i] *= g;
}

MOIETY_SIMD_CLONES void dequantize_rows(const DequantizeJob& job, int64_t begin, int64_t end) {
  alignas(64) float values[kSegment] = {};
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t c = 0; c < job.out_cols; c += kSegment) {
      const int64_t n = std::min(kSegment, job.out_cols - c);
      // A block of 16 that was rotated is needed whole.
      segment(job, r, c, job.undo_rht ? (n + 15) / 16 * 16 : n, values);
      for (int64_t i = 0; job.undo_rht && i < n; i += 16) {
        undo_rht(*reinterpret_cast<float(*)[16]>(values + i), job.spec.rht_signs);
      }
      if (job.dtype == DType::kBFloat16) {
        bf16* out = static_cast<bf16*>(job.out) + r * job.out_stride + c;
        for (int64_t i = 0; i < n; ++i) out[i] = bf16(values[i]);
      } else {
        float* out = static_cast<float*>(job.out) + r * job.out_stride + c;
        for (int64_t i = 0; i < n; ++i) out[i] = canonical(values[i]);
      }
    }
  }
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
