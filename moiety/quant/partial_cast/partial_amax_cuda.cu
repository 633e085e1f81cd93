#include "moiety/base/copy.h"
#include "moiety/base/launch.cuh"
#include "moiety/quant/partial_cast/partial_cast_device.cuh"

namespace moiety::quant {
namespace device {
namespace {

// Maxima of the columns of quads, held in the words of a quad.
template <class T>
struct Maxima {
  uint32_t word[Quad<T>::kWords] = {};

  __device__ void raise(const Quad<T>& x) {
#pragma unroll
    for (int i = 0; i < Quad<T>::kWords; ++i) {
      if constexpr (sizeof(T) == 4) {
        word[i] = max(word[i], x.word[i] & 0x7FFFFFFFu);
      } else {
        word[i] = __vmaxu2(word[i], x.word[i] & 0x7FFF7FFFu);
      }
    }
  }
  __device__ void raise(const Maxima& x) {
#pragma unroll
    for (int i = 0; i < Quad<T>::kWords; ++i) {
      word[i] = sizeof(T) == 4 ? max(word[i], x.word[i]) : __vmaxu2(word[i], x.word[i]);
    }
  }
  // Bits of the maximum of column i, and of the maximum of all.
  __device__ uint32_t column(int i) const {
    if constexpr (sizeof(T) == 4) return word[i];
    return i % 2 ? word[i / 2] & 0xFFFF0000u : word[i / 2] << 16;
  }
  __device__ uint32_t all() const {
    if constexpr (sizeof(T) == 4) return max(max(word[0], word[1]), max(word[2], word[3]));
    const uint32_t both = __vmaxu2(word[0], word[1]);
    return max(both & 0xFFFF0000u, both << 16);
  }
};

template <class T>
__device__ uint32_t amax_of(const Quad<T>& x) {
  Maxima<T> m;
  m.raise(x);
  return m.all();
}

// Maxima of four rows over four lanes, the first of which is a multiple of four: lane i gets that
// of row i.
__device__ uint32_t rows_max(const uint32_t (&v)[4]) {
  const bool odd = lane() & 1, high = lane() & 2;
  const uint32_t a = max(odd ? v[1] : v[0], __shfl_xor_sync(kWarp, odd ? v[0] : v[1], 1));
  const uint32_t b = max(odd ? v[3] : v[2], __shfl_xor_sync(kWarp, odd ? v[2] : v[3], 1));
  return max(high ? b : a, __shfl_xor_sync(kWarp, high ? a : b, 2));
}

// The words of a strip's blocks.
struct Words {
  std::byte* words = nullptr;  // words of the direction; null if the format has no blocks
  int64_t first = 0;  // number of the block that has the lane's columns in the strip's first row
  int64_t down = 0;   // distance from a row of blocks to the next
  int rows = 1, lanes = 1;  // of a block
  bool exists = false;      // whether the lane's block exists
  bool mxfp8, e5m2, through_bf16;

  static __device__ Words of(const PartialItem& item, const PartialTile& tile,
                             std::byte* reduction) {
    Words w;
    w.mxfp8 = is_mxfp8(item.spec.format);
    w.e5m2 = item.spec.element == DType::kE5M2;
    w.through_bf16 = item.spec.through_bf16;
    w.rows = int(item.block_rows);
    if (item.row.size() == 0) return w;
    w.words = reduction + item.row.offset;
    w.lanes = int(item.block_cols) / kQuad;
    w.down = item.row.cols;
    w.first = quotient(tile.row, item.block_rows) * w.down + quotient(tile.col, item.block_cols) +
              lane() / w.lanes;
    w.exists = lane() / w.lanes * w.lanes * kQuad < tile.cols;
    return w;
  }
  // Whether each row of the matrix has a word of its own.
  __device__ bool of_rows() const { return rows == 1; }
  // Stores the words of the blocks in rows r to r + 3, up to `end`; `mine` are maxima over the
  // lane's elements. All lanes call it, and the next function too.
  __device__ void put_rows(int r, int end, const uint32_t (&mine)[4]) const {
    r += lane() % 4;
    const uint32_t amax = others_max(rows_max(mine));
    if (exists && lane() % lanes < 4 && r < end) store(first + r * down, amax);
  }
  // Stores the words of the blocks that hold row r.
  __device__ void put(int r, uint32_t mine) const {
    if (!words) return;
    const uint32_t amax = others_max(lane_max<3>(mine));
    if (exists && lane() % lanes == 0) store(first + r / rows * down, amax);
  }

 private:
  // The maximum over a block, from the maximum over four lanes.
  __device__ uint32_t others_max(uint32_t v) const {
    if (lanes > 4) v = lane_max<4>(v);
    if (lanes > 8) v = lane_max<24>(v);
    return detail::rounded_amax(v, through_bf16);
  }
  __device__ void store(int64_t i, uint32_t amax) const {
    if (mxfp8) {
      reinterpret_cast<uint8_t*>(words)[i] = detail::Mxfp8Rule{e5m2}.word(amax);
    } else if (rows > kStripRows) {  // only a part of the block is here
      raise(reinterpret_cast<float*>(words) + i, amax);
    } else {
      reinterpret_cast<uint32_t*>(words)[i] = amax;
    }
  }
};

// Stores a word for each column of the strip, for kMxfp8 with col.
template <class T>
__device__ void put_columns(const PartialItem& item, const PartialTile& tile, const Maxima<T>& all,
                            std::byte* reduction) {
  const int column = lane() * kQuad;
  auto* words = reinterpret_cast<uint8_t*>(reduction + item.col.offset) +
                tile.row / kStripRows * item.col.cols + tile.col;
  const detail::Mxfp8Rule rule{item.spec.element == DType::kE5M2};
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    const uint32_t amax = detail::rounded_amax(all.column(i), item.spec.through_bf16);
    if (column + i < tile.cols) words[column + i] = rule.word(amax);
  }
}

template <class T, Access kAccess>
__device__ void measure_strip(const PartialJob& job, const PartialTile& tile,
                              std::byte* reduction) {
  // Rows whose elements are loaded together.
  constexpr int kRows = kAccess == Access::kQuads && sizeof(T) == 2 ? 8 : 4;
  const Strip<T> strip = Strip<T>::of(job, tile);
  const Words words = Words::of(job.item, tile, reduction);
  const int step = words.of_rows() ? kStripRows : min(words.rows, kStripRows);
  Maxima<T> all;
  for (int block = 0; block < strip.rows; block += step) {
    Maxima<T> here;
    for (int r = block; r < min(block + step, strip.rows); r += kRows) {
      Quad<T> x[kRows];
      strip.template load<kAccess>(r, x);
#pragma unroll
      for (int i = 0; i < kRows; ++i) here.raise(x[i]);
      if (!words.of_rows()) continue;
#pragma unroll
      for (int i = 0; i < kRows; i += 4) {
        const uint32_t four[] = {amax_of(x[i]), amax_of(x[i + 1]), amax_of(x[i + 2]),
                                 amax_of(x[i + 3])};
        words.put_rows(r + i, strip.rows, four);
      }
    }
    if (!words.of_rows()) words.put(block, here.all());
    all.raise(here);
  }
  const PartialItem& item = job.item;
  if (item.want_col) put_columns(item, tile, all, reduction);
  if (item.tensor_word < 0) return;
  const uint32_t amax = detail::rounded_amax(lane_max<31>(all.all()), words.through_bf16);
  if (lane() == 0) raise(reinterpret_cast<float*>(reduction + item.tensor_word), amax);
}

__global__ void __launch_bounds__(32 * kPartialWarps, 6)
    measure_strips(const __grid_constant__ PartialWork work, std::byte* reduction) {
  const int64_t i = warp_number();
  if (i >= work.strip_count) return;
  const PartialTile tile = work.strips[i];
  const PartialJob& job = work.jobs[tile.item];
  with_access(access_of(job, tile), [&](auto access) {
    if (job.arrays.bf16_master) {
      measure_strip<bf16, access.value>(job, tile, reduction);
    } else {
      measure_strip<float, access.value>(job, tile, reduction);
    }
  });
}

}  // namespace
}  // namespace device

namespace detail {

void partial_amax_cuda(const PartialGpuTable& table, const TensorView& reduction,
                       const Stream& stream) {
  fill_bytes(reduction, 0, stream);
  launch("partial_amax", device::measure_strips,
         {blocks_for(table.work.strip_count, device::kPartialWarps), 32 * device::kPartialWarps},
         stream, table.work, static_cast<std::byte*>(reduction.raw()));
}

}  // namespace detail
}  // namespace moiety::quant
