// Kernel of the formats with one-dimensional blocks: row codes straight from registers, col codes
// from a copy of the tile in shared memory, X read once.
#pragma once

#include "moiety/quant/hadamard.h"
#include "moiety/quant/quantize_scales.cuh"
#include "moiety/quant/quantize_source.cuh"

namespace moiety::quant::device {

// Where a thread's i-th unit lies in the tile: eight lanes a row, so that a warp holds 16 rows.
__device__ inline int unit_row(int i) {
  return threadIdx.x / 32 * 16 + 4 * i + threadIdx.x % 32 / 8;
}
__device__ inline int unit_col() { return threadIdx.x % 8 * kUnit; }
constexpr int kUnits = 4;  // of a thread

// The thread's units of a tile; what lies outside of X is +0.
template <class T>
__device__ void load_units(const QuantizeJob& job, const Place& place, Unit<T> (&x)[kUnits]) {
  const T* base = static_cast<const T*>(job.x);
  const bool vector =
      (reinterpret_cast<uintptr_t>(base) | uintptr_t(job.stride) * sizeof(T)) % 16 == 0;
  const int64_t c = place.col + unit_col();
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int64_t r = place.row + unit_row(i);
    x[i] = load_unit(base + r * job.stride + c, r < job.rows ? job.cols - c : 0, vector);
  }
}

// Codes of the unit from (r, c) to the row data; those past the end are 0.
template <Format F>
__device__ void store_row_codes(const QuantizeJob& job, const Codes& codes, int64_t r, int64_t c) {
  uint8_t* row = job.row.data + r * job.row.pitch;
  if constexpr (is_fp4(F)) {
    store_codes<8>(row + c / 2, codes, 8, true);
  } else {
    store_codes<16>(row + c, codes, job.cols - c, job.row.pitch % 16 == 0);
  }
}

// Row direction of one unit; all lanes call it. Returns the bits of its block's amax.
template <Format F, class C, bool kStochastic, class T>
__device__ uint32_t cast_row_unit(const QuantizeJob& job, const TensorFactors<F>& tensor,
                                  const Unit<T>& x, int64_t r, int64_t c) {
  constexpr int kLanes = block_shape(F).cols / kUnit;
  const uint32_t amax = lane_max<kLanes - 1>(amax_bits(x));
  if (r >= job.rows || c >= job.cols) return amax;
  const auto factor = BlockFactor<F>::of(job, tensor, amax);
  if (threadIdx.x % kLanes == 0) {
    factor.store(job.row.scales, r * job.row.scale_pitch + c / block_shape(F).cols);
  }
  RandomStream stream{};
  uint64_t block = 0;
  if constexpr (kStochastic) {
    stream = job.random_stream(Direction::kRow);
    block = job.position(Direction::kRow).block(r, c / kUnit);
  }
  Codes codes = encode_unit<C, kStochastic>(x, factor.encode, stream, block);
  if constexpr (is_fp4(F)) clear_past<8>(&codes, job.cols - c);
  store_row_codes<F>(job, codes, r, c);
  return amax;
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

  __device__ T* elements() const { return reinterpret_cast<T*>(memory); }
  __device__ uint8_t* codes() const { return memory + kElementBytes; }
  __device__ uint8_t* scales() const { return codes() + kTile * kPitch; }  // [column][8]
  __device__ uint32_t* amax() const {                                      // [quarter][column]
    return reinterpret_cast<uint32_t*>(scales() + kTile * 8);
  }

  __device__ void put(const Unit<T> (&x)[kUnits]) const {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      auto* to = reinterpret_cast<uint4*>(elements() + unit_row(i) * kTile + unit_col());
#pragma unroll
      for (int w = 0; w < Unit<T>::kWords; w += 4) {
        to[w / 4] = make_uint4(x[i].word[w], x[i].word[w + 1], x[i].word[w + 2], x[i].word[w + 3]);
      }
    }
  }
  // Sixteen rows from r of columns c and c + 1.
  __device__ void get(int r, int c, float (&out)[2][kUnit]) const {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      const T* from = elements() + (r + i) * kTile + c;
      if constexpr (sizeof(T) == 4) {
        const float2 v = *reinterpret_cast<const float2*>(from);
        out[0][i] = v.x;
        out[1][i] = v.y;
      } else {
        const uint32_t v = *reinterpret_cast<const uint32_t*>(from);
        out[0][i] = __uint_as_float(v << 16);
        out[1][i] = __uint_as_float(v & 0xFFFF0000u);
      }
    }
  }
};

__device__ inline uint32_t amax_bits(const float (&x)[kUnit]) {
  uint32_t m = 0;
#pragma unroll
  for (int i = 0; i < kUnit; ++i) m = max(m, abs_bits(x[i]));
  return m;
}

__device__ inline void rotate(float (&x)[kUnit], uint16_t signs) {
#pragma unroll
  for (int i = 0; i < kUnit; ++i) x[i] = bf16(x[i]);
  apply_rht(x, signs);
}

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
                                uint32_t (&amax)[2]) {
  amax[0] = amax[1] = 0;
  for (int b = 0; b < 2; ++b) {
    float x[2][kUnit];
    tile.get(part.row + 16 * b, part.col, x);
    amax[0] = max(amax[0], amax_bits(x[0]));
    amax[1] = max(amax[1], amax_bits(x[1]));
  }
  if constexpr (F == Format::kFp8Block1x128) {
    tile.amax()[part.quarter * kTile + part.col] = amax[0];
    tile.amax()[part.quarter * kTile + part.col + 1] = amax[1];
    __syncthreads();
    for (int q = 0; q < 4; ++q) {
      amax[0] = max(amax[0], tile.amax()[q * kTile + part.col]);
      amax[1] = max(amax[1], tile.amax()[q * kTile + part.col + 1]);
    }
  }
}

// Codes and scales of the columns into shared memory (float32 scales and those of MXFP8 to where
// they belong). Returns the largest amax that the thread met.
template <Format F, class C, bool kStochastic, class T>
__device__ uint32_t cast_columns(const QuantizeJob& job, const TensorFactors<F>& tensor,
                                 const Place& place, const ColumnTile<F, T>& tile) {
  const ColumnPart part = ColumnPart::mine();
  const int64_t c = place.col + part.col, r0 = place.row + part.row;
  const bool rotated = F == Format::kNvfp4 && job.spec.rht_col;
  uint32_t amax[2], largest = 0;
  if constexpr (F != Format::kNvfp4) measure_columns(tile, part, amax);
  RandomStream stream{};
  if constexpr (kStochastic) stream = job.random_stream(Direction::kCol);
  for (int b = 0; b < 2; ++b) {
    float x[2][kUnit];
    tile.get(part.row + 16 * b, part.col, x);
    const int64_t left = job.rows - (r0 + 16 * b);
    const int64_t valid = rotated && left > 0 ? kUnit : left;
    uint32_t byte_pair[kUnit];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (F == Format::kNvfp4) {
        if (rotated) rotate(x[j], job.spec.rht_signs);
        amax[j] = amax_bits(x[j]);
      }
      if (c + j < job.cols && left > 0) largest = max(largest, amax[j]);
      const auto factor = BlockFactor<F>::of(job, tensor, amax[j]);
      uint64_t block = 0;
      if constexpr (kStochastic) {
        block = job.position(Direction::kCol).block(c + j, (r0 + 16 * b) / kUnit);
      }
      Codes codes = encode_unit<C, kStochastic>(x[j], factor.encode, stream, block);
      clear_past<ColumnTile<F, T>::kUnitBytes>(&codes, valid);
      if constexpr (ColumnTile<F, T>::kTransposed) {
        const int at = (part.row + 16 * b) * ColumnTile<F, T>::kUnitBytes / kUnit;
        store_codes<ColumnTile<F, T>::kUnitBytes>(
            tile.codes() + (part.col + j) * ColumnTile<F, T>::kPitch + at, codes,
            ColumnTile<F, T>::kUnitBytes, true);
      } else {
#pragma unroll
        for (int i = 0; i < kUnit; ++i) {
          const uint32_t code = codes.word[i / 4] >> 8 * (i % 4) & 0xFFu;
          byte_pair[i] = j == 0 ? code : byte_pair[i] | code << 8;
        }
      }
      if constexpr (F == Format::kNvfp4) {
        tile.scales()[(part.col + j) * 8 + 2 * part.quarter + b] =
            left > 0 ? uint8_t(factor.stored) : 0;
      } else if (b == 0 && c + j < job.cols) {
        if constexpr (F == Format::kMxfp8) {
          if (r0 < job.padded_rows) {
            static_cast<uint8_t*>(job.col.scales)[r0 / 32 * job.col.scale_pitch + c + j] =
                left > 0 ? uint8_t(factor.stored) : 0;
          }
        } else if (part.quarter == 0 && place.row < job.padded_rows) {
          factor.store(job.col.scales, (c + j) * job.col.scale_pitch + place.row / kTile);
        }
      }
    }
    if constexpr (!ColumnTile<F, T>::kTransposed) {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        *reinterpret_cast<uint16_t*>(tile.codes() + (part.row + 16 * b + i) * kTile + part.col) =
            uint16_t(byte_pair[i]);
      }
    }
  }
  return largest;
}

// From shared memory to the col arrays. After a barrier.
template <Format F, class T>
__device__ void write_columns(const QuantizeJob& job, const Place& place,
                              const ColumnTile<F, T>& tile) {
  constexpr int kBytes = ColumnTile<F, T>::kUnitBytes;
  const int64_t rows = min(int64_t(kTile), job.padded_rows - place.row);
  const int64_t cols = min(int64_t(kTile), job.cols - place.col);
  // Lines of eight chunks: a column of X, or with MXFP8 a row.
  const int64_t lines = ColumnTile<F, T>::kTransposed ? cols : rows;
  int64_t bytes = cols;
  uint8_t* base = job.col.data + place.row * job.col.pitch + place.col;
  if constexpr (ColumnTile<F, T>::kTransposed) {
    bytes = is_fp4(F) ? (rows + 15) / 16 * 8 : rows;
    base = job.col.data + place.col * job.col.pitch + place.row / (is_fp4(F) ? 2 : 1);
  }
  const bool vector = (reinterpret_cast<uintptr_t>(base) | job.col.pitch) % kBytes == 0;
  for (int i = threadIdx.x; i < 8 * kTile; i += kThreads) {
    const int line = i / 8, at = i % 8 * kBytes;
    if (line >= lines) break;
    const uint8_t* from = tile.codes() + line * ColumnTile<F, T>::kPitch + at;
    Codes codes;
    if constexpr (kBytes == 16) {
      *reinterpret_cast<uint4*>(codes.word) = *reinterpret_cast<const uint4*>(from);
    } else {
      *reinterpret_cast<uint2*>(codes.word) = *reinterpret_cast<const uint2*>(from);
    }
    store_codes<kBytes>(base + line * job.col.pitch + at, codes, bytes - at, vector);
  }
  if constexpr (F == Format::kNvfp4) {
    const int column = threadIdx.x;
    if (column >= cols) return;
    const int64_t blocks = (rows + 15) / 16;
    uint8_t* to = static_cast<uint8_t*>(job.col.scales) +
                  (place.col + column) * job.col.scale_pitch + place.row / 16;
    Codes scales;
    *reinterpret_cast<uint2*>(scales.word) =
        *reinterpret_cast<const uint2*>(tile.scales() + column * 8);
    store_codes<8>(to, scales, blocks, reinterpret_cast<uintptr_t>(to) % 8 == 0);
  }
}

template <Format F, class T, bool kStochastic, bool kCol>
__global__ void __launch_bounds__(kThreads) cast_blocks(const __grid_constant__ Source source) {
  extern __shared__ uint4 memory[];
  __shared__ QuantizeJob shared_job;
  if (source.skip && *source.skip != 0) return;
  const ColumnTile<F, T> tile{reinterpret_cast<uint8_t*>(memory)};
  Place place;
  for (int64_t t = blockIdx.x; find_tile(source, t, &shared_job, &place); t += gridDim.x) {
    const QuantizeJob& job = source.kind == Source::Kind::kSingle ? source.job : shared_job;
    if (place.first && threadIdx.x == 0) write_scalars<F>(job);
    Unit<T> x[kUnits];
    load_units(job, place, x);
    if constexpr (kCol) {
      __syncthreads();  // the last tile's columns are out
      tile.put(x);
    }
    uint32_t largest = 0;
    with_codec_of<F>(job.spec, [&](auto codec) {
      using C = decltype(codec);
      if (!kCol || job.want_row) {
        const auto tensor = TensorFactors<F>::of(job, 0);
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
          largest =
              max(largest, cast_row_unit<F, C, kStochastic>(
                               job, tensor, x[i], place.row + unit_row(i), place.col + unit_col()));
        }
      }
      if constexpr (kCol) {
        if (!job.want_col) return;
        __syncthreads();
        const auto tensor = TensorFactors<F>::of(job, 1);
        largest = max(largest, cast_columns<F, C, kStochastic>(job, tensor, place, tile));
      }
    });
    report_amax<F>(job, largest);
    if (kCol && job.want_col) {
      __syncthreads();
      write_columns(job, place, tile);
    }
  }
}

}  // namespace moiety::quant::device
