// The col direction of the formats with one-dimensional blocks: the tile in shared memory, and from
// there columns.
#pragma once

#include "moiety/quant/hadamard.h"
#include "moiety/quant/quantize_tile.cuh"

namespace moiety::quant::device {

// Sign bits of a row, or none.
template <class T>
__device__ uint32_t sign_flip(uint32_t signs, int row) {
  constexpr uint32_t kSigns = sizeof(T) == 2 ? 0x80008000u : 0x80000000u;
  return signs >> row % kUnit & 1 ? kSigns : 0;
}

// Sixteen rows of two columns that lie side by side, as in memory.
template <class T>
struct ColumnPair {
  static constexpr bool kPacked = sizeof(T) == 2;
  using Row = std::conditional_t<kPacked, uint32_t, uint2>;
  Row row[kUnit];

  __device__ float value(int i, int column) const {
    if constexpr (kPacked) {
      return __uint_as_float(column == 0 ? row[i] << 16 : row[i] & 0xFFFF0000u);
    } else {
      return __uint_as_float(column == 0 ? row[i].x : row[i].y);
    }
  }
  // Bits of the largest magnitudes become at least those of the columns.
  __device__ void raise(uint32_t (&amax)[2]) const {
    if constexpr (kPacked) {
      uint32_t m = 0;
#pragma unroll
      for (int i = 0; i < kUnit; ++i) m = __vmaxu2(m, row[i] & 0x7FFF7FFFu);
      amax[0] = max(amax[0], m << 16);
      amax[1] = max(amax[1], m & 0xFFFF0000u);
    } else {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        amax[0] = max(amax[0], row[i].x & 0x7FFFFFFFu);
        amax[1] = max(amax[1], row[i].y & 0x7FFFFFFFu);
      }
    }
  }
  __device__ Unit<T> column(int which) const {
    Unit<T> out;
#pragma unroll
    for (int w = 0; w < Unit<T>::kWords; ++w) {
      if constexpr (kPacked) {
        out.word[w] = __byte_perm(row[2 * w], row[2 * w + 1], which == 0 ? 0x5410 : 0x7632);
      } else {
        out.word[w] = __float_as_uint(value(w, which));
      }
    }
    return out;
  }
  // Bit i of `signs` changes the sign of row i.
  __device__ void flip(uint32_t signs) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      const uint32_t bits = sign_flip<T>(signs, i);
      if constexpr (kPacked) {
        row[i] ^= bits;
      } else {
        row[i].x ^= bits;
        row[i].y ^= bits;
      }
    }
  }
  // The transform of a column whose signs have been changed, rounded to BF16.
  __device__ Unit<bf16> rotated(int which) const {
    float x[kUnit];
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      x[i] = kPacked ? value(i, which) : float(bf16(value(i, which)));
    }
    detail::quarter_hadamard(x, detail::Elements{});
    Unit<bf16> out;
#pragma unroll
    for (int w = 0; w < kUnit / 2; ++w) out.word[w] = bf16_pair(x[2 * w], x[2 * w + 1]);
    return out;
  }
};

// BF16 values as elements of X are.
template <class T>
__device__ Unit<T> widen(const Unit<bf16>& x) {
  if constexpr (sizeof(T) == 2) {
    return x;
  } else {
    Unit<T> out;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) out.word[i] = __float_as_uint(x[i]);
    return out;
  }
}

// The col direction of a tile: its elements, and what is made of them, in shared memory.
template <Format F, class T>
struct ColumnTile {
  static constexpr bool kTransposed = F != Format::kMxfp8;
  static constexpr int kUnitBytes = is_fp4(F) ? 8 : 16;
  // Codes of a column (kMxfp8: of a row). More than they are, for the sake of the banks.
  static constexpr int kPitch = is_fp4(F) ? 72 : (kTransposed ? 144 : 128);
  static constexpr int kElementBytes = kTile * kTile * int(sizeof(T));
  static constexpr int kBytes = kElementBytes + kTile * kPitch + kTile * 8 + 4 * kTile * 4;

  uint8_t* memory;

  __device__ uint8_t* codes() const { return memory + kElementBytes; }
  __device__ uint8_t* scales() const { return codes() + kTile * kPitch; }  // [column][8]
  __device__ uint32_t* amax() const {                                      // [quarter][column]
    return reinterpret_cast<uint32_t*>(scales() + kTile * 8);
  }
  // The element (r, c). Parts of 16 bytes change places within a row, so that neither units nor
  // columns meet bank conflicts.
  __device__ T* element(int r, int c) const {
    constexpr int kPart = 16 / int(sizeof(T));
    const int part = c / kPart;
    return reinterpret_cast<T*>(memory) + r * kTile + (part ^ part / 8) * kPart + c % kPart;
  }

  // The thread's units, and one of them back. `signs`: bit r % 16 changes the sign of row r.
  __device__ void put(const Unit<T> (&x)[kUnits], uint32_t signs) const {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      Unit<T> unit = x[i];
      if (signs != 0) flip(&unit, sign_flip<T>(signs, unit_row(i)));
#pragma unroll
      for (int w = 0; w < Unit<T>::kWords; w += 4) {
        *unit_part(i, w) =
            make_uint4(unit.word[w], unit.word[w + 1], unit.word[w + 2], unit.word[w + 3]);
      }
    }
  }
  __device__ Unit<T> unit(int i, uint32_t signs) const {
    Unit<T> out;
#pragma unroll
    for (int w = 0; w < Unit<T>::kWords; w += 4) {
      const uint4 part = *unit_part(i, w);
      out.word[w] = part.x;
      out.word[w + 1] = part.y;
      out.word[w + 2] = part.z;
      out.word[w + 3] = part.w;
    }
    if (signs != 0) flip(&out, sign_flip<T>(signs, unit_row(i)));
    return out;
  }
  // Sixteen rows from r of columns c and c + 1, c even.
  __device__ ColumnPair<T> get(int r, int c) const {
    using Row = typename ColumnPair<T>::Row;
    ColumnPair<T> out;
#pragma unroll
    for (int i = 0; i < kUnit; ++i) out.row[i] = *reinterpret_cast<const Row*>(element(r + i, c));
    return out;
  }

 private:
  static __device__ void flip(Unit<T>* x, uint32_t bits) {
#pragma unroll
    for (uint32_t& word : x->word) word ^= bits;
  }
  // From word w, a multiple of 4, of the thread's i-th unit.
  __device__ uint4* unit_part(int i, int w) const {
    return reinterpret_cast<uint4*>(element(unit_row(i), unit_col() + w * 4 / int(sizeof(T))));
  }
};

// A thread's part of the columns: columns 2 lane and 2 lane + 1 of a half, a quarter of the rows.
struct ColumnPart {
  int col, row, quarter;
  static __device__ ColumnPart mine() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    return {warp % 2 * 64 + 2 * lane, warp / 2 * 32, warp / 2};
  }
};

// amax of a part's two columns over its 32 rows, or over all 128 (FP8: a block).
template <Format F, class T>
__device__ void measure_columns(const ColumnTile<F, T>& tile, const ColumnPart& part,
                                const ColumnPair<T> (&x)[2], uint32_t (&amax)[2]) {
  amax[0] = amax[1] = 0;
  x[0].raise(amax);
  x[1].raise(amax);
  if constexpr (F == Format::kFp8Block1x128) {
    auto* const all = reinterpret_cast<uint2*>(tile.amax()) + part.col / 2;
    all[part.quarter * kTile / 2] = make_uint2(amax[0], amax[1]);
    __syncthreads();
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      amax[0] = max(amax[0], all[q * kTile / 2].x);
      amax[1] = max(amax[1], all[q * kTile / 2].y);
    }
  }
}

// Codes of the two columns' sixteen rows from r of the tile to where `write_columns` finds them.
template <Format F, class T>
__device__ void put_codes(const ColumnTile<F, T>& tile, int r, int c, const Codes (&codes)[2]) {
  constexpr int kBytes = ColumnTile<F, T>::kUnitBytes, kPitch = ColumnTile<F, T>::kPitch;
  if constexpr (ColumnTile<F, T>::kTransposed) {
    uint8_t* to = tile.codes() + c * kPitch + r * kBytes / kUnit;
    store_codes<kBytes>(to, codes[0]);
    store_codes<kBytes>(to + kPitch, codes[1]);
  } else {
    auto* to = reinterpret_cast<uint16_t*>(tile.codes() + r * kPitch + c);
#pragma unroll
    for (int i = 0; i < kUnit; i += 2) {
      const uint32_t rows =
          __byte_perm(codes[0].word[i / 4], codes[1].word[i / 4], i % 4 == 0 ? 0x5140 : 0x7362);
      to[i * kPitch / 2] = uint16_t(rows);
      to[(i + 1) * kPitch / 2] = uint16_t(rows >> 16);
    }
  }
}

// Codes and scales of the columns into shared memory (float32 scales and those of MXFP8 to where
// they belong). Returns the largest amax that the thread met.
template <Format F, class C, bool kStochastic, class T>
__device__ uint32_t cast_columns(const QuantizeJob& job, TensorFactors<F> tensor,
                                 const Place& place, const ColumnTile<F, T>& tile) {
  const ColumnPart part = ColumnPart::mine();
  const int64_t c = place.col + part.col, r0 = place.row + part.row;
  const int rows = int(min(job.rows - r0, int64_t{kTile}));  // that exist from r0 on
  const int cols = int(min(job.cols - c, int64_t{2}));
  const bool rotated = F == Format::kNvfp4 && job.spec.rht_col;
  const auto random = device_random<kStochastic>(job, Direction::kCol);
  uint64_t block = 0, blocks_per_column = 0;
  if constexpr (kStochastic) {
    const BlockPosition position = job.position(Direction::kCol);
    block = position.block(c, r0 / kUnit);
    blocks_per_column = uint64_t(position.blocks_per_row);
  }
  uint32_t amax[2], largest = 0;
  ColumnPair<T> x[2];
  if constexpr (F != Format::kNvfp4) {
    x[0] = tile.get(part.row, part.col);
    x[1] = tile.get(part.row + kUnit, part.col);
    measure_columns<F, T>(tile, part, x, amax);
  }
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    const int left = rows - kUnit * b, valid = rotated && left > 0 ? kUnit : left;
    if constexpr (F == Format::kNvfp4) x[b] = tile.get(part.row + kUnit * b, part.col);
    Codes codes[2];
    uint32_t stored[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      Unit<T> unit;
      if (F == Format::kNvfp4 && rotated) {
        unit = widen<T>(x[b].rotated(j));
      } else {
        unit = x[b].column(j);
      }
      if constexpr (F == Format::kNvfp4) amax[j] = amax_bits(unit);
      if (j < cols && left > 0) largest = max(largest, amax[j]);
      const auto factor = BlockFactor<F>::of(job, tensor, amax[j]);
      codes[j] = encode_unit<F, C, kStochastic>(
          unit, factor.encode, amax[j],
          random_bits<kStochastic>(random, block + j * blocks_per_column + b));
      if (valid < kUnit) clear_past<ColumnTile<F, T>::kUnitBytes>(&codes[j], valid);
      stored[j] = left > 0 ? factor.stored : 0;
      if (F != Format::kNvfp4 && b == 0 && j < cols) {
        if constexpr (F == Format::kMxfp8) {
          if (r0 < job.padded_rows) {
            static_cast<uint8_t*>(job.col.scales)[r0 / 32 * job.col.scale_pitch + c + j] =
                uint8_t(stored[j]);
          }
        } else if (part.quarter == 0 && place.row < job.padded_rows) {
          factor.store(job.col.scales, (c + j) * job.col.scale_pitch + place.row / kTile);
        }
      }
    }
    put_codes<F, T>(tile, part.row + kUnit * b, part.col, codes);
    if constexpr (F == Format::kNvfp4) {
      uint8_t* to = tile.scales() + part.col * 8 + 2 * part.quarter + b;
      to[0] = uint8_t(stored[0]);
      to[8] = uint8_t(stored[1]);
    }
  }
  return largest;
}

// From shared memory to the col arrays. After a barrier.
template <Format F, class T>
__device__ void write_columns(const QuantizeJob& job, const Place& place,
                              const ColumnTile<F, T>& tile) {
  constexpr bool kTransposed = ColumnTile<F, T>::kTransposed;
  constexpr int kBytes = ColumnTile<F, T>::kUnitBytes, kPitch = ColumnTile<F, T>::kPitch;
  const int rows = int(min(job.padded_rows - place.row, int64_t{kTile}));
  const int cols = int(min(job.cols - place.col, int64_t{kTile}));
  // Lines of eight chunks: a column of X, or with MXFP8 a row.
  const int lines = kTransposed ? cols : rows;
  const int bytes = kTransposed ? (is_fp4(F) ? (rows + 15) / 16 * 8 : rows) : cols;
  const int line = threadIdx.x / 8, at = threadIdx.x % 8 * kBytes;
  const int64_t pitch = job.col.pitch;
  const uint8_t* from = tile.codes() + line * kPitch + at;
  uint8_t* to = job.col.data +
                (kTransposed ? (place.col + line) * pitch + place.row / (is_fp4(F) ? 2 : 1)
                             : (place.row + line) * pitch + place.col) +
                at;
  const bool vector = (reinterpret_cast<uintptr_t>(job.col.data) | pitch) % kBytes == 0;
  constexpr int kStep = kThreads / 8;
  if (vector && lines == kTile && bytes == 8 * kBytes) {
#pragma unroll
    for (int i = 0; i < kTile; i += kStep) {
      store_codes<kBytes>(to, load_codes<kBytes>(from + i * kPitch));
      to += kStep * pitch;
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < kTile; i += kStep) {
      store_code_run<kBytes>(to, load_codes<kBytes>(from + i * kPitch),
                             line + i < lines ? bytes - at : kNoRun, vector);
      to += kStep * pitch;
    }
  }
  if constexpr (F == Format::kNvfp4) {
    const int column = threadIdx.x;
    if (column >= cols) return;
    const int blocks = (rows + 15) / 16;
    uint8_t* to = static_cast<uint8_t*>(job.col.scales) +
                  (place.col + column) * job.col.scale_pitch + place.row / 16;
    const auto scales = *reinterpret_cast<const Vector<2>*>(tile.scales() + column * 8);
    if (blocks == 8 && reinterpret_cast<uintptr_t>(to) % 8 == 0) {
      *reinterpret_cast<Vector<2>*>(to) = scales;
    } else {
      store_bytes(to, scales.word, blocks);
    }
  }
}

}  // namespace moiety::quant::device
