// The loops over elements of the CPU quantizers, each compiled for several instruction sets; what
// calls them is scalar code that moves through a matrix in pieces that stay in the cache. Internal
// to moiety/quant; the bits are those of quantize_ref.cpp.
#pragma once

#include <cstdint>

#include "moiety/base/dtype.h"
#include "moiety/formats/bf16.h"
#include "moiety/quant/scale_math.h"

namespace moiety::quant::loops {

constexpr int64_t kPanel = 128;  // rows and columns of a panel

void widen(const bf16* x, int64_t n, float* out);

// Bits of the largest |x|.
uint32_t amax(const float* x, int64_t n);
uint32_t amax(const bf16* x, int64_t n);
uint32_t largest(const uint32_t* amax, int64_t n);
// Of each block of 16, 32 or 128 elements.
void block_amax(const float* x, int block, int64_t blocks, uint32_t* out);
void block_amax(const bf16* x, int block, int64_t blocks, uint32_t* out);
// Of each column of x [rows, 128], `stride` elements a row.
void column_amax(const float* x, int64_t stride, int64_t rows, uint32_t* out);
void column_amax(const bf16* x, int64_t stride, int64_t rows, uint32_t* out);

// Scales of n blocks, and the factors that elements are multiplied with.
void fp8_scales(const uint32_t* amax, int64_t n, float fp8_max, float amax_floor, bool pow2,
                float* factor, float* scale);
void mxfp8_scales(const uint32_t* amax, int64_t n, bool e5m2, float* factor, uint8_t* scale);
void nvfp4_scales(const uint32_t* amax, int64_t n, const Nvfp4TensorScale& tensor, float* factor,
                  uint8_t* scale);
// out[i] = factor[i / block].
void spread(const float* factor, int block, int64_t blocks, float* out);

// codes[i] = encode(RN(x[i] * factor[i])), x float32 or bf16 as `input` says; `random` is not read
// unless rounding is stochastic.
using Encode = void (*)(const void* x, const float* factor, const uint8_t* random, int64_t n,
                        uint8_t* codes);
Encode encode(DType input, DType element, bool stochastic);

// out[i] = codes 2i and 2i + 1, i < n / 2; or code i of two rows, i < 128.
void pack_pairs(const uint8_t* codes, int64_t n, uint8_t* out);
void pack_rows(const uint8_t* even, const uint8_t* odd, uint8_t* out);

// Columns of x [16, 128], rounded to BF16, transformed.
void rotate(float (&x)[16][kPanel], uint16_t signs);

// out[c * out_pitch + r] = in[r * in_pitch + c]; rows and cols are multiples of 16.
void transpose(const uint8_t* in, int64_t in_pitch, int64_t rows, int64_t cols, uint8_t* out,
               int64_t out_pitch);

}  // namespace moiety::quant::loops
