// The loops over elements of the CPU quantizers, each compiled for several instruction sets. Their
// callers are scalar code that moves through a matrix in pieces that stay in the cache. Elements
// are taken in pairs, whose codes are a half-word, or a byte of two nibbles. Internal to
// moiety/quant; the bits are those of quantize_ref.cpp.
#pragma once

#include <cstdint>

#include "moiety/base/dtype.h"
#include "moiety/formats/bf16.h"
#include "moiety/quant/scale_math.h"

namespace moiety::quant::loops {

constexpr int64_t kPanel = 128;  // rows and columns of a panel

// Rows of n elements, float32 or bf16; n is a multiple of 16.
struct Rows {
  DType dtype;
  const void* x;
  int64_t pitch;  // bytes
  int64_t rows, n;

  const void* row(int64_t r) const { return static_cast<const std::byte*>(x) + r * pitch; }
};

// out[i] = bf16(x[i]).
void round_to_bf16(const float* x, int64_t n, bf16* out);

// The bits of the largest |x|.
uint32_t amax(DType dtype, const void* x, int64_t n);
uint32_t largest(const uint32_t* amax, int64_t n);
// The same for each block of 16, 32 or 128 elements.
void block_amax(DType dtype, const void* x, int block, int64_t blocks, uint32_t* out);
// The same for each column; n is 128.
void column_amax(const Rows& x, uint32_t* out);

// The scales of n blocks, and the factors that elements are multiplied with.
void fp8_scales(const uint32_t* amax, int64_t n, float fp8_max, float amax_floor, bool pow2,
                float* factor, float* scale);
void mxfp8_scales(const uint32_t* amax, int64_t n, bool e5m2, float* factor, uint8_t* scale);
void nvfp4_scales(const uint32_t* amax, int64_t n, const Nvfp4TensorScale& tensor, float* factor,
                  uint8_t* scale);

// The factors of pair i: one for its even element, one for its odd one.
struct PairFactors {
  const float* even;
  const float* odd;
};
// out[i] = the factor of the block of pair i, which serves both elements.
void spread(const float* factor, int block, int64_t blocks, float* out);
// Splits the factors of elements that have one each.
void split(const float* factor, int64_t n, float* even, float* odd);

// The codes of x[r][i] * factor of i, rounded. Rows of n codes lie one after the other, and so do
// rows of `random` (read only if rounding is stochastic).
using Encode = void (*)(const Rows& x, const PairFactors& factor, const uint8_t* random,
                        uint8_t* codes);
// The facts known about the values, from less to more.
enum class Known {
  kNothing,
  kFinite,  // elements are finite, factors finite and positive
  kPowers   // and factors are powers of two
};
Encode encode(DType input, DType element, bool stochastic, Known known);

// Columns of 16 rows of 128 elements, rounded to BF16 and transformed, with the amax of each
// column; rotated_amax gives only the largest |y|. y is aligned to 32 bytes.
void rotate(const Rows& x, uint16_t signs, bf16 (*y)[kPanel], uint32_t* amax);
uint32_t rotated_amax(const Rows& x, uint16_t signs);

// Transposes panels of 128 x 128 codes; rows of nibbles have 64 bytes. The third transposes 16 x
// 128 bytes.
void transpose(const uint8_t* in, uint8_t* out);
void transpose_nibbles(const uint8_t* in, uint8_t* out);
void transpose_16(const uint8_t* in, uint8_t* out);

}  // namespace moiety::quant::loops
