// Transposes a tile of 128 x 128 codes through shared memory: rows go in as units of sixteen codes,
// columns come out as runs that lie together in the transposed matrix. Words are placed so that
// neither side meets bank conflicts. For kernels of 256 threads.
#pragma once

#include <cstdint>

#include "moiety/quant/quantize_device.cuh"

namespace moiety::quant::device {

template <bool kFp4>
struct CodeTile {
  static constexpr int kRowWords = kFp4 ? 16 : 32;
  static constexpr int kUnitBytes = kFp4 ? 8 : 16;
  static constexpr int kBytes = 128 * kRowWords * 4;
  uint32_t* word;  // shared memory, kBytes, aligned to 16

  // Codes of columns 16 u to 16 u + 15 of row r.
  __device__ void put(int r, int u, const Codes& codes) const {
    const int step = kUnitBytes / 4;
    uint32_t* to = word + r * kRowWords + ((step * u) ^ (step * (r / 16)));
    if constexpr (kFp4) {
      *reinterpret_cast<uint2*>(to) = make_uint2(codes.word[0], codes.word[1]);
    } else {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(codes.word);
    }
  }

  // Columns [0, cols) go to rows of `out` that begin `pitch` bytes apart: `bytes` (at most 128,
  // FP4: 64) each. Codes of rows past the end must be 0. After a barrier.
  __device__ void write(uint8_t* out, int64_t pitch, int64_t cols, int64_t bytes) const {
    const int part = threadIdx.x % 8;   // rows 16 part to 16 part + 15
    const int group = threadIdx.x / 8;  // four columns
    const bool vector = (reinterpret_cast<uintptr_t>(out) | pitch) % kUnitBytes == 0;
    uint32_t row[16];
    const int column_word = kFp4 ? group / 2 : group;
#pragma unroll
    for (int k = 0; k < 16; ++k) {
      row[k] = word[(16 * part + k) * kRowWords + (column_word ^ (kUnitBytes / 4 * part))];
    }
    Codes column[4];
    gather(row, kFp4 ? 16 * (group % 2) : 0, column);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int c = 4 * group + j;
      if (c >= cols) continue;
      const int64_t at = kUnitBytes * part;
      store_codes<kUnitBytes>(out + c * pitch + at, column[j], bytes - at, vector);
    }
  }

 private:
  // Four columns of sixteen rows; of FP4, those from bit `shift` of each row.
  static __device__ void gather(const uint32_t (&row)[16], int shift, Codes (&column)[4]) {
    if constexpr (kFp4) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int w = 0; w < 2; ++w) {
          uint32_t out = 0;
#pragma unroll
          for (int k = 0; k < 8; ++k) {
            out |= (row[8 * w + k] >> (shift + 4 * j) & 15u) << 4 * k;
          }
          column[j].word[w] = out;
        }
      }
    } else {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t* r = row + 4 * w;
        const uint32_t low01 = __byte_perm(r[0], r[1], 0x5140);
        const uint32_t low23 = __byte_perm(r[2], r[3], 0x5140);
        const uint32_t high01 = __byte_perm(r[0], r[1], 0x7362);
        const uint32_t high23 = __byte_perm(r[2], r[3], 0x7362);
        column[0].word[w] = __byte_perm(low01, low23, 0x5410);
        column[1].word[w] = __byte_perm(low01, low23, 0x7632);
        column[2].word[w] = __byte_perm(high01, high23, 0x5410);
        column[3].word[w] = __byte_perm(high01, high23, 0x7632);
      }
    }
  }
};

}  // namespace moiety::quant::device
