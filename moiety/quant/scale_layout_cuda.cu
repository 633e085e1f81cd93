// Layouts of scales on GPUs, in tiles that pass through shared memory: scales are read along the
// rows of one side and written along those of the other.
#include "moiety/base/launch.cuh"
#include "moiety/quant/scale_layout_job.h"

namespace moiety::quant {
namespace {

constexpr int kThreads = 256;

// Tiles of byte scales: 128 rows of 32 words of four scales, placed so that neither words of a row,
// nor those of rows 32 apart, nor words of consecutive rows share a bank.
constexpr int kByteRows = 128, kQuads = 32, kPitch = kQuads + 1;
__device__ int place_of(int row, int quad) { return row * kPitch + (quad + row / 32 * 8) % kQuads; }

// Byte scales (r, c) to (r, c + 3); 0 outside of the matrix. `words`: they can be read as one.
__device__ uint32_t load_quad(const ScaleMatrix& in, int64_t r, int64_t c, bool words) {
  if (r >= in.rows) return 0;
  const uint8_t* from = in.data + in.index(r, c);
  if (words && c + 4 <= in.cols) return *reinterpret_cast<const uint32_t*>(from);
  uint32_t out = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (c + i < in.cols) out |= uint32_t{from[i * in.col_stride]} << 8 * i;
  }
  return out;
}

// A matrix whose columns are contiguous: four rows are one word. Eight lanes read 32 bytes of a
// column, and the lanes of four columns write into the same words.
__device__ void load_columns(const ScaleMatrix& in, int64_t r0, int64_t c0, uint32_t* tile) {
  const int lane = threadIdx.x % 32;
  auto* bytes = reinterpret_cast<uint8_t*>(tile);
  for (int i = threadIdx.x / 32; i < 4 * kQuads; i += kThreads / 32) {
    const int quad = i / 4, row = i % 4 * 32 + lane % 8 * 4;
    const int64_t r = r0 + row, c = c0 + 4 * quad + lane / 8;
    uint32_t rows = 0;
    if (c < in.cols && r < in.rows) {
      const uint8_t* from = in.data + in.index(r, c);
      if (r + 4 <= in.rows && reinterpret_cast<uintptr_t>(from) % 4 == 0) {
        rows = *reinterpret_cast<const uint32_t*>(from);
      } else {
        for (int k = 0; k < 4; ++k) {
          if (r + k < in.rows) rows |= uint32_t{from[k]} << 8 * k;
        }
      }
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      bytes[place_of(row + k, quad) * 4 + lane / 8] = uint8_t(rows >> 8 * k);
    }
  }
}

template <bool kSwizzled>
__global__ void __launch_bounds__(kThreads)
    convert_bytes(const __grid_constant__ ScaleMatrix in, uint32_t tile_columns, uint32_t* out) {
  __shared__ uint32_t tile[kByteRows * kPitch];
  const uint32_t tile_row = blockIdx.x / tile_columns;
  const uint32_t tile_column = blockIdx.x - tile_row * tile_columns;
  const int64_t r0 = int64_t{tile_row} * kByteRows, c0 = int64_t{tile_column} * (4 * kQuads);
  const int64_t quads = (in.cols + 3) / 4, q0 = c0 / 4;
  const int64_t here = min(int64_t{kQuads}, quads - q0);
  if (in.row_stride == 1 && in.row_block == 1) {
    load_columns(in, r0, c0, tile);
  } else {
    const bool words = in.col_stride == 1 && in.row_stride % 4 == 0 &&
                       reinterpret_cast<uintptr_t>(in.data) % 4 == 0;
    for (int i = threadIdx.x; i < kByteRows * kQuads; i += kThreads) {
      const int row = i / kQuads, quad = i % kQuads;
      tile[place_of(row, quad)] = load_quad(in, r0 + row, c0 + 4 * quad, words);
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kByteRows * kQuads; i += kThreads) {
    if constexpr (kSwizzled) {
      // Word i of the 512-byte tiles in order: row i / 4 % 32 of quarter i % 4.
      const int quad = i / kByteRows, row = i / 4 % 32 + i % 4 * 32;
      if (quad >= here) return;
      out[(int64_t{tile_row} * quads + q0) * kByteRows + i] = tile[place_of(row, quad)];
    } else {
      const int row = i / kQuads, quad = i % kQuads;
      if (quad < here) out[(r0 + row) * quads + q0 + quad] = tile[place_of(row, quad)];
    }
  }
}

// Tiles of float32 scales: 128 rows of 32.
constexpr int kFloatCols = 32;

__global__ void __launch_bounds__(kThreads)
    convert_floats(const __grid_constant__ ScaleMatrix in, uint32_t tile_columns, uint32_t* out) {
  __shared__ uint32_t tile[kFloatCols * (kByteRows + 1)];
  const uint32_t tile_row = blockIdx.x / tile_columns;
  const uint32_t tile_column = blockIdx.x - tile_row * tile_columns;
  const int64_t r0 = int64_t{tile_row} * kByteRows, c0 = int64_t{tile_column} * kFloatCols;
  const auto* from = reinterpret_cast<const uint32_t*>(in.data);
  for (int i = threadIdx.x; i < kByteRows * kFloatCols; i += kThreads) {
    const int row = i / kFloatCols, column = i % kFloatCols;
    const bool inside = r0 + row < in.rows && c0 + column < in.cols;
    tile[column * (kByteRows + 1) + row] = inside ? from[in.index(r0 + row, c0 + column)] : 0;
  }
  __syncthreads();
  const int64_t pitch = (in.rows + 3) / 4 * 4;
  for (int i = threadIdx.x; i < kByteRows * kFloatCols; i += kThreads) {
    const int column = i / kByteRows, row = i % kByteRows;
    if (c0 + column >= in.cols || r0 + row >= pitch) continue;
    out[(c0 + column) * pitch + r0 + row] = tile[column * (kByteRows + 1) + row];
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
  const bool floats = layout == ScaleLayout::kSm90MnMajor;
  const int64_t columns = blocks_for(in.cols, floats ? kFloatCols : 4 * kQuads);
  const auto kernel = floats                                  ? convert_floats
                      : layout == ScaleLayout::kSm100Swizzled ? convert_bytes<true>
                                                              : convert_bytes<false>;
  launch("convert_scales", kernel, {blocks_for(in.rows, kByteRows) * columns, kThreads}, stream, in,
         static_cast<uint32_t>(columns), reinterpret_cast<uint32_t*>(out));
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
