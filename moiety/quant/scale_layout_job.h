// The scales of one direction as a matrix [R, C], in any order in memory. Internal to moiety/quant;
// the contract is in scale_layout.h.
#pragma once

#include <bit>
#include <cstdint>

#include "moiety/base/host_device.h"
#include "moiety/base/stream.h"
#include "moiety/formats/fp32.h"
#include "moiety/formats/quantized.h"
#include "moiety/formats/ue8m0.h"

namespace moiety::quant {

struct ScaleMatrix {
  uint8_t* data = nullptr;
  int64_t rows = 0, cols = 0;
  int width = 1;  // bytes of a scale
  // Scale (r, c) is number (r / row_block) * row_stride + c * col_stride.
  int64_t row_block = 1, row_stride = 0, col_stride = 1;

  MOIETY_HD int64_t index(int64_t r, int64_t c) const {
    return r / row_block * row_stride + c * col_stride;
  }
};

// The number of scales and the index of one, when kSm100Swizzled, kPadded or kSm90MnMajor lays out
// a matrix [rows, cols].
int64_t layout_scales(ScaleLayout layout, int64_t rows, int64_t cols);  // with pads
MOIETY_HD inline int64_t layout_index(ScaleLayout layout, int64_t rows, int64_t cols, int64_t r,
                                      int64_t c) {
  const int64_t quads = (cols + 3) / 4;
  switch (layout) {
    case ScaleLayout::kSm100Swizzled:
      return (r / 128 * quads + c / 4) * 512 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4;
    case ScaleLayout::kPadded:
      return r * quads * 4 + c;
    default:
      return c * ((rows + 3) / 4 * 4) + r;
  }
}

// A positive power of two as its exponent byte; anything else except NaN is a fault.
MOIETY_HD inline uint8_t exponent_byte(uint32_t bits, bool* fault) {
  const bool power = (bits & 0x007FFFFFu) == 0 && bits > 0 && bits < 0x7F800000u;
  if (power) return static_cast<uint8_t>(bits >> 23);
  if (bits == 0x00400000u) return 0;
  *fault |= !is_nan(std::bit_cast<float>(bits));
  return UE8M0::kNan;
}

void convert_scales_reference(const ScaleMatrix& in, ScaleLayout layout, uint8_t* out);
void convert_scales_cpu(const ScaleMatrix& in, ScaleLayout layout, uint8_t* out);
void compact_scales_cpu(const uint8_t* in, ScaleLayout layout, const ScaleMatrix& out);
// `cols` is the number of elements along a row of the direction.
void fp8_block_to_mxfp8_cpu(const ScaleMatrix& in, int64_t cols, uint8_t* out, uint32_t* flags);
void convert_scales_cuda(const ScaleMatrix& in, ScaleLayout layout, uint8_t* out,
                         const Stream& stream);
void compact_scales_cuda(const uint8_t* in, ScaleLayout layout, const ScaleMatrix& out,
                         const Stream& stream);
void fp8_block_to_mxfp8_cuda(const ScaleMatrix& in, int64_t cols, uint8_t* out, uint32_t* flags,
                             const Stream& stream);

}  // namespace moiety::quant
