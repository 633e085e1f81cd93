// The col direction of the formats with one-dimensional blocks: tiles of X are copied to shared
// memory, and columns are read from there.
#pragma once

#include "moiety/quant/convert/transpose_device.cuh"
#include "moiety/quant/hadamard.h"
#include "moiety/quant/quantize/quantize_coded.cuh"

namespace moiety::quant::device {

// The sign bits that flip a row, or none.
template <class T>
__device__ uint32_t sign_flip(uint32_t signs, int row) {
  constexpr uint32_t kSigns = sizeof(T) == 2 ? 0x80008000u : 0x80000000u;
  return signs >> row % kUnit & 1 ? kSigns : 0;
}

constexpr int kQuad = 4;  // columns of a thread

// Magnitudes of four columns, in words, as elements lie in memory.
template <class T>
struct QuadMagnitude {
  static constexpr int kWords = int(sizeof(T));
  uint32_t word[kWords] = {};

  __device__ void raise(int w, uint32_t other) {
    word[w] = sizeof(T) == 2 ? __vmaxu2(word[w], other) : max(word[w], other);
  }
  // Makes each the maximum over lanes whose numbers differ only in these bits.
  template <int kMask>
  __device__ void raise_over_lanes() {
#pragma unroll
    for (int bit = 1; bit < 32; bit *= 2) {
      if (!(kMask & bit)) continue;
#pragma unroll
      for (int w = 0; w < kWords; ++w) raise(w, __shfl_xor_sync(kWarp, word[w], bit));
    }
  }
  // Bits of the magnitude of column j.
  __device__ uint32_t bits(int j) const {
    if constexpr (sizeof(T) == 4) return word[j];
    return j % 2 ? word[j / 2] & 0xFFFF0000u : word[j / 2] << 16;
  }
};

// Sixteen rows of four columns that lie side by side, as in memory.
template <class T>
struct ColumnQuad {
  static constexpr bool kPacked = sizeof(T) == 2;
  using Row = Vector<int(sizeof(T))>;
  Row row[kUnit];

  __device__ float value(int i, int j) const {
    if constexpr (kPacked) {
      return j % 2 ? high_bf16(row[i].word[j / 2]) : low_bf16(row[i].word[j / 2]);
    } else {
      return __uint_as_float(row[i].word[j]);
    }
  }
  __device__ QuadMagnitude<T> magnitude() const {
    QuadMagnitude<T> out;
#pragma unroll
    for (int w = 0; w < out.kWords; ++w) {
#pragma unroll
      for (int i = 0; i < kUnit; ++i) {
        out.raise(w, row[i].word[w] & (kPacked ? 0x7FFF7FFFu : 0x7FFFFFFFu));
      }
    }
    return out;
  }
  __device__ Unit<T> column(int j) const {
    Unit<T> out;
#pragma unroll
    for (int w = 0; w < Unit<T>::kWords; ++w) {
      if constexpr (kPacked) {
        out.word[w] = __byte_perm(row[2 * w].word[j / 2], row[2 * w + 1].word[j / 2],
                                  j % 2 == 0 ? 0x5410 : 0x7632);
      } else {
        out.word[w] = row[w].word[j];
      }
    }
    return out;
  }
  // Changes the sign of each row i whose bit in `signs` is set.
  __device__ void flip(uint32_t signs) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      const uint32_t bits = sign_flip<T>(signs, i);
#pragma unroll
      for (uint32_t& word : row[i].word) word ^= bits;
    }
  }
  // The transform of a column whose signs have been changed, before it is quartered and rounded.
  __device__ void transform(int j, float (&x)[kUnit]) const {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) x[i] = kPacked ? value(i, j) : float(bf16(value(i, j)));
    detail::hadamard(x);
  }
  __device__ Unit<bf16> rotated(int j) const {
    float x[kUnit];
    transform(j, x);
    Unit<bf16> out;
#pragma unroll
    for (int w = 0; w < kUnit / 2; ++w) {
      out.word[w] = bf16_word(0.25f * x[2 * w], 0.25f * x[2 * w + 1]);
    }
    return out;
  }
};

// The larger of `largest` and the magnitudes of the transform of column j, not quartered; NaN if
// one of them is NaN.
template <class T>
__device__ float raise_transformed(const ColumnQuad<T>& x, int j, float largest) {
  float w[kUnit];
  x.transform(j, w);
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(largest) : "f"(fabsf(w[i])));
  }
  return largest;
}

// BF16 values as elements of the dtype of X.
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

// Begins to copy n bytes from global to shared memory; bytes past the first `valid` become 0 and
// are not read.
template <int n>
__device__ void copy_async(void* to, const void* from, int valid) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (n == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
                 "r"(valid)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(address), "l"(from), "n"(n),
                 "r"(valid)
                 : "memory");
  }
}
// Waits until all copies that the thread has begun are done.
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// A tile of X in shared memory.
template <class T>
struct StagedTile {
  static constexpr int kBytes = kTile * kTile * int(sizeof(T));
  uint8_t* memory;

  // Begins to fill the tile; elements outside of X become +0. It is full after wait_for_copies()
  // and a barrier.
  __device__ void fill(const QuantizeJob& job, const Place& place) const {
    const auto address = reinterpret_cast<uintptr_t>(job.x) | uintptr_t(job.stride) * sizeof(T);
    if (address % 16 == 0) {
      copy<16>(job, place);
    } else if (address % 8 == 0) {
      copy<8>(job, place);
    } else if (address % 4 == 0) {
      copy<4>(job, place);
    } else if constexpr (sizeof(T) == 2) {
      Unit<T> x[kUnits];
      load_units(job, place, x);
      put(x);
    }
  }
  // The same from codes; it is full after a barrier.
  __device__ void fill_coded(const Source& source, const QuantizeJob& job,
                             const Place& place) const {
    Unit<T> x[kUnits];
    take_units<true>(source, job, place, x);
    put(x);
  }
  // The thread's i-th unit.
  __device__ Unit<T> unit(int i) const {
    Unit<T> out;
#pragma unroll
    for (int w = 0; w < Unit<T>::kWords; w += 4) {
      const uint4 part = *unit_part(i, w);
      out.word[w] = part.x;
      out.word[w + 1] = part.y;
      out.word[w + 2] = part.z;
      out.word[w + 3] = part.w;
    }
    return out;
  }
  // Sixteen rows of four columns from (r, c), multiples of 16 and 4.
  __device__ ColumnQuad<T> quad(int r, int c) const {
    ColumnQuad<T> out;
    const auto* from = reinterpret_cast<const typename ColumnQuad<T>::Row*>(element(r, c));
#pragma unroll
    for (int i = 0; i < kUnit; ++i) out.row[i] = from[i * kTile / kQuad];
    return out;
  }

 private:
  __device__ void put(const Unit<T> (&x)[kUnits]) const {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
#pragma unroll
      for (int w = 0; w < Unit<T>::kWords; w += 4) {
        *unit_part(i, w) =
            make_uint4(x[i].word[w], x[i].word[w + 1], x[i].word[w + 2], x[i].word[w + 3]);
      }
    }
  }
  // Parts of 16 bytes change places within a row, so that neither units nor quads of columns, below
  // or beside each other, meet bank conflicts.
  __device__ T* element(int r, int c) const {
    constexpr int kPart = 16 / int(sizeof(T));
    const int part = c / kPart;
    return reinterpret_cast<T*>(memory) + r * kTile + (part ^ part / 8 ^ r / kUnit) * kPart +
           c % kPart;
  }
  // The place of words w to w + 3 of the thread's i-th unit, w a multiple of 4.
  __device__ uint4* unit_part(int i, int w) const {
    return reinterpret_cast<uint4*>(element(unit_row(i), unit_col() + w * 4 / int(sizeof(T))));
  }
  // Copies the tile, n bytes at a time.
  template <int n>
  __device__ void copy(const QuantizeJob& job, const Place& place) const {
    constexpr int kElements = n / int(sizeof(T)), kLanes = kTile / kElements;  // lanes of a row
    constexpr int kStep = kThreads / kLanes;
    const int r = threadIdx.x / kLanes, c = threadIdx.x % kLanes * kElements;
    const Extent extent = Extent::of(job, place);
    const int valid = min(max((extent.cols - c) * int(sizeof(T)), 0), n);
    const T* from = static_cast<const T*>(job.x) + (place.row + r) * job.stride + place.col + c;
    const int64_t step = kStep * job.stride;
#pragma unroll
    for (int i = 0; i < kTile; i += kStep) {
      copy_async<n>(element(r + i, c), from, r + i < extent.rows ? valid : 0);
      from += step;
    }
  }
};

// Loads sixteen rows of four columns of X from (r, c); elements outside of X are +0.
template <class T>
__device__ ColumnQuad<T> load_columns(const QuantizeJob& job, int64_t r, int64_t c) {
  using Row = typename ColumnQuad<T>::Row;
  const T* p = static_cast<const T*>(job.x) + r * job.stride + c;
  const auto address = reinterpret_cast<uintptr_t>(p) | uintptr_t(job.stride) * sizeof(T);
  const int rows = int(min(job.rows - r, int64_t{kUnit}));
  const int cols = int(min(job.cols - c, int64_t{kQuad}));
  ColumnQuad<T> out;
  if (address % sizeof(Row) == 0 && rows == kUnit && cols == kQuad) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      out.row[i] = *reinterpret_cast<const Row*>(p + i * job.stride);
    }
    return out;
  }
#pragma unroll
  for (int i = 0; i < kUnit; ++i) {
    out.row[i] = Row{};
    if (i >= rows) continue;
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      if (j >= cols) continue;
      if constexpr (sizeof(T) == 2) {
        out.row[i].word[j / 2] |= uint32_t{p[i * job.stride + j].bits} << 16 * (j % 2);
      } else {
        out.row[i].word[j] = __float_as_uint(p[i * job.stride + j]);
      }
    }
  }
  return out;
}

// The same as values of codes, of the job's rows from `first` on.
__device__ inline ColumnQuad<bf16> load_coded_columns(const Source& source, const QuantizeJob& job,
                                                      int64_t first, int64_t r, int64_t c) {
  const int cols = int(min(job.cols - c, int64_t{kQuad}));
  ColumnQuad<bf16> out;
#pragma unroll 4
  for (int i = 0; i < kUnit; ++i) {
    const auto row = CodedRun<kQuad>(source.coded, first + r + i, c, r + i < job.rows ? cols : 0);
    out.row[i] = {row.out.word[0], row.out.word[1]};
  }
  return out;
}

// A thread's part of the columns: a quad of them and sixteen rows. Where the codes are transposed,
// eight lanes lie below each other, so that they hold a run of a column's codes; otherwise sixteen
// lie side by side.
struct ColumnPart {
  int row, col;
  template <bool kTransposed>
  static __device__ ColumnPart mine() {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if constexpr (kTransposed) return {lane % 8 * kUnit, (warp * 4 + lane / 8) * kQuad};
    return {(warp / 2 * 2 + lane / 16) * kUnit, (warp % 2 * 16 + lane % 16) * kQuad};
  }
};

// Stores the codes of four columns as rows of four, to a matrix that is not transposed. `rows` and
// `cols` are the numbers that exist.
__device__ inline void store_quad_rows(const Codes (&codes)[kQuad], uint8_t* to, int64_t pitch,
                                       int rows, int cols) {
  uint32_t row[kUnit / 4][4];
#pragma unroll
  for (int w = 0; w < kUnit / 4; ++w) {
    transpose_bytes({codes[0].word[w], codes[1].word[w], codes[2].word[w], codes[3].word[w]},
                    row[w]);
  }
  const auto address = reinterpret_cast<uintptr_t>(to) | uintptr_t(pitch);
  if (rows >= kUnit && cols == kQuad && address % kQuad == 0) {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      *reinterpret_cast<uint32_t*>(to) = row[i / 4][i % 4];
      to += pitch;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kUnit; ++i) {
      if (i < rows) store_bytes<1>(to, {row[i / 4][i % 4]}, cols);
      to += pitch;
    }
  }
}

// The places of the scales of a thread's columns. Of lanes that share blocks one stores the scale;
// with 1x128 blocks each stores that of another column.
template <Format F>
class ColumnScales {
 public:
  __device__ ColumnScales(const QuantizeJob& job, const Place& place, const ColumnPart& part)
      : to_(static_cast<uint8_t*>(job.col.scales)), row_(part.row) {
    const int64_t r = place.row + part.row, c = place.col + part.col, pitch = job.col.scale_pitch;
    if constexpr (F == Format::kFp8Block1x128) {
      to_ += (c * pitch + place.row / kTile) * 4;
      step_ = pitch * 4;
      exists_ = place.row < job.padded_rows;
    } else {
      to_ += F == Format::kNvfp4 ? c * pitch + r / kUnit : r / 32 * pitch + c;
      step_ = F == Format::kNvfp4 ? pitch : 1;
      exists_ = r < job.padded_rows && (F == Format::kNvfp4 || part.row % 32 == 0);
    }
  }
  // Stores the scale of column j, after next() has moved there. `empty` says that the block lies
  // past the rows.
  __device__ void store(int j, const BlockFactor<F>& factor, bool empty) const {
    if (!exists_) return;
    if constexpr (F == Format::kFp8Block1x128) {
      if (row_ == j * kUnit) factor.store(to_, 0);
    } else {
      *to_ = empty ? 0 : uint8_t(factor.stored);
    }
  }
  __device__ void next() { to_ += step_; }

 private:
  uint8_t* to_;
  int64_t step_;
  int row_;
  bool exists_;
};

// Casts the col direction of a tile. Returns the largest amax that the thread met.
template <Format F, class C, bool kStochastic, class T>
__device__ uint32_t cast_columns(const QuantizeJob& job, TensorFactors<F> tensor,
                                 const Place& place, const StagedTile<T>& tile) {
  constexpr bool kTransposed = F != Format::kMxfp8;
  constexpr int kBytes = is_fp4(F) ? 8 : 16;  // bytes of the codes of a column's sixteen rows
  const ColumnPart part = ColumnPart::mine<kTransposed>();
  const int64_t r = place.row + part.row, c = place.col + part.col;
  const int rows = int(min(job.rows - r, int64_t{kUnit}));  // rows that exist; perhaps less than 0
  const int cols = int(min(job.cols - c, int64_t{kQuad}));
  const int padded = int(min(job.padded_rows - r, int64_t{kTile}));
  const bool rotated = F == Format::kNvfp4 && job.spec.rht_col;
  const auto random = device_random<kStochastic>(job, Direction::kCol);
  uint64_t block = 0, blocks_per_column = 0;
  if constexpr (kStochastic) {
    const BlockPosition position = job.position(Direction::kCol);
    block = position.block(c, r / kUnit);
    blocks_per_column = uint64_t(position.blocks_per_row);
  }
  ColumnQuad<T> x = tile.quad(part.row, part.col);
  QuadMagnitude<T> magnitude;
  if (rotated) {
    x.flip(uniform(job.spec.rht_signs));
  } else {
    magnitude = x.magnitude();
    // These lanes share blocks.
    if constexpr (F == Format::kFp8Block1x128) magnitude.template raise_over_lanes<7>();
    if constexpr (F == Format::kMxfp8) magnitude.template raise_over_lanes<16>();
  }
  const int valid = rotated && rows > 0 ? kUnit : rows;
  const int64_t pitch = job.col.pitch;
  const bool vector = (reinterpret_cast<uintptr_t>(job.col.data) | uintptr_t(pitch)) % kBytes == 0;
  uint8_t* to = job.col.data + (kTransposed ? c * pitch + r / (is_fp4(F) ? 2 : 1) : r * pitch + c);
  ColumnScales<F> scales(job, place, part);
  uint32_t largest = 0;
  Codes codes[kQuad];
#pragma unroll
  for (int j = 0; j < kQuad; ++j) {
    Unit<T> unit;
    uint32_t amax;
    if (F == Format::kNvfp4 && rotated) {
      unit = widen<T>(x.rotated(j));
      amax = amax_bits(unit);
    } else {
      unit = x.column(j);
      amax = magnitude.bits(j);
    }
    if (j < cols && rows > 0) largest = max(largest, amax);
    const auto factor = BlockFactor<F>::of(job, tensor, amax);
    codes[j] = encode_unit<F, C, kStochastic>(
        unit, factor.encode, amax, random_bits<kStochastic>(random, block + j * blocks_per_column));
    if (valid < kUnit) clear_past<kBytes>(&codes[j], valid);
    if constexpr (kTransposed) {
      store_code_run<kBytes>(to, codes[j], j < cols ? padded : kNoRun, vector);
      to += pitch;
    }
    if (j < cols) scales.store(j, factor, rows <= 0);
    scales.next();
  }
  if constexpr (!kTransposed) store_quad_rows(codes, to, pitch, padded, cols);
  return largest;
}

}  // namespace moiety::quant::device
