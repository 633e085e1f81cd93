// Layouts of scales on GPUs. The arrays are small, so that what counts is how many loads wait at a
// time.
#include <bit>

#include "moiety/base/launch.cuh"
#include "moiety/quant/quantize_memory.cuh"
#include "moiety/quant/scale_layout_job.h"
#include "moiety/quant/transpose_device.cuh"

namespace moiety::quant {
namespace {

using device::Window;

constexpr int kThreads = 256;

// A scale matrix as kernels read it.
struct Scales {
  ScaleMatrix m;
  int row_shift;  // of a block of rows
  device::ByteRange all;

  explicit Scales(const ScaleMatrix& in)
      : m(in), row_shift(std::countr_zero(static_cast<uint64_t>(in.row_block))) {
    const int64_t lines = blocks_for(in.rows, in.row_block);
    all = {in.data,
           in.data + in.width * ((lines - 1) * in.row_stride + (in.cols - 1) * in.col_stride + 1)};
  }
  __device__ int64_t index(int64_t r, int64_t c) const {
    return (r >> row_shift) * m.row_stride + c * m.col_stride;
  }
  // Sixteen byte scales of n rows, `step` apart from r on, from column c on, where columns lie
  // together; 0 outside.
  template <int n>
  __device__ void load_rows(int64_t r, int step, int64_t c, uint32_t (&out)[n][4]) const {
    Window<4> window[n];
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const int64_t row = r + k * step;
      if (row < m.rows && c < m.cols) window[k].load(m.data + index(row, c), all);
    }
#pragma unroll
    for (int k = 0; k < n; ++k) {
      window[k].words(out[k]);
      device::keep_first<8>(out[k], m.cols - c);
    }
  }
  // Byte scales of n times rows r to r + 3 (of blocks), `step` apart, and columns c to c + 3, where
  // rows lie together: a word a row; 0 outside.
  template <int n>
  __device__ void load_columns(int64_t r, int step, int64_t c, uint32_t (&out)[n][4]) const {
    Window<1> window[n][4];
    const int64_t lines = blocks_for(m.rows, m.row_block);
#pragma unroll
    for (int k = 0; k < n; ++k) {
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const int64_t line = r + k * step;
        const bool exists = line < lines && c + b < m.cols;
        if (exists) window[k][b].load(m.data + line + (c + b) * m.col_stride, all);
      }
    }
#pragma unroll
    for (int k = 0; k < n; ++k) {
      uint32_t column[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        uint32_t word[1];
        window[k][b].words(word);
        device::keep_first<8>(word, lines - (r + k * step));
        column[b] = word[0];
      }
      device::transpose_bytes(column, out[k]);
    }
  }
};

// How a matrix of byte scales lies: rows that are contiguous, columns that are, or columns that are
// and whose scales stand for a block of rows each.
enum class Lie { kRows, kColumns, kColumnsOfTiles };

// A warp takes 128 rows of four words of four scales; a lane four rows, 32 apart, of each word, or
// with kColumns of one word four such fours of rows.
template <Lie kLie, bool kSwizzled>
__global__ void __launch_bounds__(kThreads)
    convert_bytes(const __grid_constant__ Scales in, uint32_t warp_columns, int64_t warps,
                  uint32_t* out) {
  __shared__ uint4 tiles[kThreads / 32][8];
  const int64_t i = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  if (i >= warps) return;
  const int lane = threadIdx.x % 32;
  const uint32_t tile = uint32_t(i) / warp_columns;
  const int64_t r0 = int64_t{tile} * 128, quad0 = (uint32_t(i) - tile * warp_columns) * 4;
  const int64_t quads = (in.m.cols + 3) / 4;
  uint32_t word[4][4];
  if constexpr (kLie == Lie::kColumnsOfTiles) {
    auto& blocks = tiles[threadIdx.x / 32];
    if (lane < 8) {
      uint32_t rows[1][4];
      in.load_columns((r0 >> in.row_shift) + lane / 4 * 4, 0, 4 * (quad0 + lane % 4), rows);
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        reinterpret_cast<uint32_t*>(&blocks[lane / 4 * 4 + b])[lane % 4] = rows[0][b];
      }
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int row_here = 32 * k + lane;
      const bool inside = r0 + row_here < in.m.rows;
      const uint4 row = inside ? blocks[row_here >> in.row_shift] : make_uint4(0, 0, 0, 0);
      word[k][0] = row.x;
      word[k][1] = row.y;
      word[k][2] = row.z;
      word[k][3] = row.w;
    }
  } else if constexpr (kLie == Lie::kRows) {
    in.load_rows(r0 + lane, 32, 4 * quad0, word);
  } else {
    in.load_columns(r0 + lane % 8 * 4, 32, 4 * (quad0 + lane / 8), word);
  }
#pragma unroll
  for (int x = 0; x < 4; ++x) {
    const int64_t quad = quad0 + (kLie == Lie::kColumns ? lane / 8 : x);
    const int row = kLie == Lie::kColumns ? lane % 8 * 4 + x : lane;
    if (quad >= quads) continue;
    if constexpr (kSwizzled) {
      reinterpret_cast<uint4*>(out)[(tile * quads + quad) * 32 + row] =
          make_uint4(word[0][x], word[1][x], word[2][x], word[3][x]);
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) out[(r0 + 32 * k + row) * quads + quad] = word[k][x];
    }
  }
}

// kPadded, of rows: a thread copies sixteen scales.
__global__ void __launch_bounds__(kThreads)
    pad_rows(const __grid_constant__ Scales in, uint32_t row_threads, int64_t threads,
             uint32_t* out) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= threads) return;
  const uint32_t r = uint32_t(i) / row_threads;
  const int64_t quad = (uint32_t(i) - r * row_threads) * 4, quads = (in.m.cols + 3) / 4;
  uint32_t word[1][4];
  in.load_rows(r, 0, 4 * quad, word);
  uint32_t* to = out + r * quads + quad;
  if (quads % 4 == 0) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(word[0]);
  } else {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if (quad + w < quads) to[w] = word[0][w];
    }
  }
}

// Tiles of float32 scales: 64 rows of 32.
constexpr int kFloatRows = 64, kFloatCols = 32;

__global__ void __launch_bounds__(kThreads)
    convert_floats(const __grid_constant__ Scales in, uint32_t tile_columns, uint32_t* out) {
  __shared__ uint32_t tile[kFloatCols * (kFloatRows + 1)];
  constexpr int kEach = kFloatRows * kFloatCols / kThreads;
  const uint32_t tile_row = blockIdx.x / tile_columns;
  const uint32_t tile_column = blockIdx.x - tile_row * tile_columns;
  const int64_t r0 = int64_t{tile_row} * kFloatRows, c0 = int64_t{tile_column} * kFloatCols;
  const auto* from = reinterpret_cast<const uint32_t*>(in.m.data);
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const int i = k * kThreads + int(threadIdx.x), row = i / kFloatCols, column = i % kFloatCols;
    const bool inside = r0 + row < in.m.rows && c0 + column < in.m.cols;
    tile[column * (kFloatRows + 1) + row] = inside ? from[in.index(r0 + row, c0 + column)] : 0;
  }
  __syncthreads();
  const int64_t pitch = (in.m.rows + 3) / 4 * 4;
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    const int i = k * kThreads + int(threadIdx.x), column = i / kFloatRows, row = i % kFloatRows;
    if (c0 + column >= in.m.cols || r0 + row >= pitch) continue;
    out[(c0 + column) * pitch + r0 + row] = tile[column * (kFloatRows + 1) + row];
  }
}

// A thread a scale, in the order of the compact ones.
template <class T>
__global__ void __launch_bounds__(kThreads)
    compact(const T* in, ScaleLayout layout, const __grid_constant__ ScaleMatrix out) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= out.rows * out.cols) return;
  const bool turned = out.col_stride != 1;
  const int64_t along = turned ? out.rows : out.cols, line = i / along, at = i - line * along;
  const int64_t r = turned ? at : line, c = turned ? line : at;
  reinterpret_cast<T*>(out.data)[out.index(r, c)] =
      in[layout_index(layout, out.rows, out.cols, r, c)];
}

// A thread a scale: four bytes, or as many as the row has.
__global__ void __launch_bounds__(kThreads)
    exponent_bytes(const __grid_constant__ ScaleMatrix in, int64_t pitch, uint8_t* out,
                   uint32_t* flags) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= in.rows * in.cols) return;
  const int64_t r = i / in.cols, c = i - r * in.cols;
  bool fault = false;
  const uint8_t byte =
      exponent_byte(reinterpret_cast<const uint32_t*>(in.data)[in.index(r, c)], &fault);
  uint8_t* to = out + r * pitch + 4 * c;
  if (4 * c + 4 <= pitch && reinterpret_cast<uintptr_t>(to) % 4 == 0) {
    *reinterpret_cast<uint32_t*>(to) = byte * 0x01010101u;
  } else {
    for (int k = 0; k < 4; ++k) {
      if (4 * c + k < pitch) to[k] = byte;
    }
  }
  if (fault && flags) atomicOr(flags, kFlagUnrepresentable);
}

}  // namespace

void convert_scales_cuda(const ScaleMatrix& in, ScaleLayout layout, uint8_t* out,
                         const Stream& stream) {
  const char* name = "convert_scales";
  const Scales scales(in);
  auto* words = reinterpret_cast<uint32_t*>(out);
  if (layout == ScaleLayout::kSm90MnMajor) {
    const int64_t columns = blocks_for(in.cols, kFloatCols);
    return launch(name, convert_floats, {blocks_for(in.rows, kFloatRows) * columns, kThreads},
                  stream, scales, static_cast<uint32_t>(columns), words);
  }
  const bool swizzled = layout == ScaleLayout::kSm100Swizzled;
  const int64_t columns = blocks_for(in.cols, 16), tiles = blocks_for(in.rows, 128);
  if (in.col_stride == 1 && !swizzled) {
    const int64_t threads = tiles * 128 * columns;
    return launch(name, pad_rows, {blocks_for(threads, kThreads), kThreads}, stream, scales,
                  static_cast<uint32_t>(columns), threads, words);
  }
  const auto kernel =
      in.col_stride == 1 ? convert_bytes<Lie::kRows, true>
      : in.row_block == 1
          ? (swizzled ? convert_bytes<Lie::kColumns, true> : convert_bytes<Lie::kColumns, false>)
          : (swizzled ? convert_bytes<Lie::kColumnsOfTiles, true>
                      : convert_bytes<Lie::kColumnsOfTiles, false>);
  const int64_t warps = tiles * columns;
  launch(name, kernel, {blocks_for(warps, kThreads / 32), kThreads}, stream, scales,
         static_cast<uint32_t>(columns), warps, words);
}

void compact_scales_cuda(const uint8_t* in, ScaleLayout layout, const ScaleMatrix& out,
                         const Stream& stream) {
  const LaunchShape shape{blocks_for(out.rows * out.cols, kThreads), kThreads};
  if (out.width == 4) {
    launch("compact_scales", compact<uint32_t>, shape, stream,
           reinterpret_cast<const uint32_t*>(in), layout, out);
  } else {
    launch("compact_scales", compact<uint8_t>, shape, stream, in, layout, out);
  }
}

void fp8_block_to_mxfp8_cuda(const ScaleMatrix& in, int64_t cols, uint8_t* out, uint32_t* flags,
                             const Stream& stream) {
  launch("fp8_block_to_mxfp8", exponent_bytes, {blocks_for(in.rows * in.cols, kThreads), kThreads},
         stream, in, blocks_for(cols, 32), out, flags);
}

}  // namespace moiety::quant
