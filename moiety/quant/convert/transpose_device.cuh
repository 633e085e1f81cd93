// A square tile of codes, transposed through shared memory: rows go in as units of sixteen codes,
// columns come out as runs that lie together in the transposed matrix. Words are placed so that
// neither side meets bank conflicts (FP4 of side 128 meets some). For kernels of 256 threads.
#pragma once

#include <cstdint>

#include "moiety/quant/quantize/quantize_memory.cuh"

namespace moiety::quant::device {

// Transposes the bytes of four words: byte b of word a becomes byte a of word b.
__device__ inline void transpose_bytes(const uint32_t (&in)[4], uint32_t (&out)[4]) {
  const uint32_t low01 = __byte_perm(in[0], in[1], 0x5140);
  const uint32_t low23 = __byte_perm(in[2], in[3], 0x5140);
  const uint32_t high01 = __byte_perm(in[0], in[1], 0x7362);
  const uint32_t high23 = __byte_perm(in[2], in[3], 0x7362);
  out[0] = __byte_perm(low01, low23, 0x5410);
  out[1] = __byte_perm(low01, low23, 0x7632);
  out[2] = __byte_perm(high01, high23, 0x5410);
  out[3] = __byte_perm(high01, high23, 0x7632);
}

template <bool kFp4, int kSide = 128>
struct CodeTile {
  static constexpr int kThreads = 256;
  static constexpr int kParts = kSide / 16;      // units of a row, and of a column
  static constexpr int kColumns = kFp4 ? 8 : 4;  // columns of a word
  static constexpr int kRowWords = kSide / kColumns;
  static constexpr int kUnitBytes = kFp4 ? 8 : 16;
  static constexpr int kUnitWords = kUnitBytes / 4;
  static constexpr int kBytes = kSide * kRowWords * 4;
  uint32_t* word;  // shared memory, kBytes, aligned to 16

  // Puts the codes of columns 16 u to 16 u + 15 of row r.
  __device__ void put(int r, int u, const Codes& codes) const {
    uint32_t* to = word + r * kRowWords + (kUnitWords * u ^ kUnitWords * (r / 16));
    store_codes<kUnitBytes>(reinterpret_cast<uint8_t*>(to), codes);
  }

  // Puts word w of row r.
  __device__ void put_word(int r, int w, uint32_t codes) const {
    word[r * kRowWords + (w ^ kUnitWords * (r / 16))] = codes;
  }

  // Writes columns [0, cols) as rows of `out` that begin `pitch` bytes apart, `bytes` each (at most
  // those of kSide codes). Codes of rows past the end must be 0. To be called after a barrier.
  __device__ void write(uint8_t* out, int64_t pitch, int64_t cols, int64_t bytes) const {
    const int part = threadIdx.x % kParts;  // rows 16 part to 16 part + 15
    const int64_t at = kUnitBytes * part;
    const bool vector = (reinterpret_cast<uintptr_t>(out) | pitch) % kUnitBytes == 0;
    for (int i = threadIdx.x / kParts; i < kRowWords; i += kThreads / kParts) {
      uint32_t row[16];
#pragma unroll
      for (int k = 0; k < 16; ++k) {
        row[k] = word[(16 * part + k) * kRowWords + (i ^ kUnitWords * part)];
      }
      Codes column[kColumns];
      turn(row, column);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int c = kColumns * i + j;
        store_code_run<kUnitBytes>(out + c * pitch + at, column[j], c < cols ? bytes - at : kNoRun,
                                   vector);
      }
    }
  }

 private:
  // Turns sixteen rows of a word each into columns.
  static __device__ void turn(const uint32_t (&row)[16], Codes (&column)[kColumns]) {
    constexpr uint32_t kLow = 0x0F0F0F0F;
#pragma unroll
    for (int w = 0; w < kUnitWords; ++w) {
      uint32_t out[4];
      if constexpr (kFp4) {
        // Rows in pairs: the bytes of even columns, and those of odd ones.
        uint32_t even[4], odd[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const uint32_t a = row[8 * w + 2 * k], b = row[8 * w + 2 * k + 1];
          even[k] = (a & kLow) | (b << 4 & ~kLow);
          odd[k] = (a >> 4 & kLow) | (b & ~kLow);
        }
        transpose_bytes(even, out);
#pragma unroll
        for (int j = 0; j < 4; ++j) column[2 * j].word[w] = out[j];
        transpose_bytes(odd, out);
#pragma unroll
        for (int j = 0; j < 4; ++j) column[2 * j + 1].word[w] = out[j];
      } else {
        const uint32_t four[4] = {row[4 * w], row[4 * w + 1], row[4 * w + 2], row[4 * w + 3]};
        transpose_bytes(four, out);
#pragma unroll
        for (int j = 0; j < 4; ++j) column[j].word[w] = out[j];
      }
    }
  }
};

}  // namespace moiety::quant::device
