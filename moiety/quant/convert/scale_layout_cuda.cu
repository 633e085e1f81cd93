// Layouts of scales on GPUs. The arrays are small, so speed depends on how many loads wait
// together.
#include <bit>
#include <type_traits>

#include "moiety/base/launch.cuh"
#include "moiety/quant/convert/transpose_device.cuh"
#include "moiety/quant/quantize/quantize_memory.cuh"
#include "moiety/quant/scale_layout_job.h"

namespace moiety::quant {
namespace {

using device::Window;

constexpr int kThreads = 256;

// A scale matrix as kernels read it.
struct Scales {
  ScaleMatrix m;
  int row_shift;  // shift from a row to its block
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
  // The alignment of rows if columns lie together: 16, 4 or 1 bytes.
  int alignment() const {
    const auto bits = std::bit_cast<uintptr_t>(m.data) |
                      static_cast<uintptr_t>(m.width * (m.cols | m.row_stride));
    return bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 1;
  }
  // Loads sixteen bytes of each of n rows, `step` apart from row r on, from column c on; zeros
  // outside of the matrix. Columns lie together.
  template <int kAlignment, int n>
  __device__ void load_rows(int64_t r, int step, int64_t c, uint32_t (&out)[n][4]) const {
    const auto at = [&](int k) { return m.data + m.width * index(r + k * step, c); };
    if constexpr (kAlignment == 1) {
      Window<4> window[n];
#pragma unroll
      for (int k = 0; k < n; ++k) {
        if (r + k * step < m.rows && c < m.cols) window[k].load(at(k), all);
      }
#pragma unroll
      for (int k = 0; k < n; ++k) {
        window[k].words(out[k]);
        device::keep_first<8>(out[k], (m.cols - c) * m.width);
      }
    } else {
      constexpr int kEach = kAlignment / 4;
#pragma unroll
      for (int k = 0; k < n; ++k) {
#pragma unroll
        for (int w = 0; w < 4; w += kEach) {
          device::Vector<kEach> v{};
          if (r + k * step < m.rows && c * m.width + 4 * w < m.cols * m.width) {
            v = *reinterpret_cast<const device::Vector<kEach>*>(at(k) + 4 * w);
          }
#pragma unroll
          for (int i = 0; i < kEach; ++i) out[k][w + i] = v.word[i];
        }
      }
    }
  }
  // Loads byte scales of n times rows r to r + 3 (of blocks), `step` apart, in columns c to c + 3,
  // a word per row; zeros outside of the matrix. Rows lie together.
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

// Writes kSm100Swizzled from rows: a block takes 128 rows of kLanes times sixteen columns, a warp a
// few rows of every 32, a lane sixteen columns of four rows that are 32 apart.
constexpr int kLanes = 4;

template <int kAlignment>
__global__ void __launch_bounds__(32 * kLanes)
    swizzle_rows(const __grid_constant__ Scales in, uint32_t block_columns, uint4* out) {
  const uint32_t tile = blockIdx.x / block_columns;
  const int row = threadIdx.x / kLanes;
  const int64_t quad0 =
      int64_t{blockIdx.x - tile * block_columns} * (4 * kLanes) + threadIdx.x % kLanes * 4;
  const int64_t quads = (in.m.cols + 3) / 4;
  uint32_t word[4][4];
  in.load_rows<kAlignment>(int64_t{tile} * 128 + row, 32, 4 * quad0, word);
  uint4* to = out + (tile * quads + quad0) * 32 + row;
#pragma unroll
  for (int x = 0; x < 4; ++x) {
    if (quad0 + x < quads) to[32 * x] = make_uint4(word[0][x], word[1][x], word[2][x], word[3][x]);
  }
}

// The kinds of a matrix of byte scales whose columns are contiguous: one scale per row, or one per
// block of rows.
enum class Lie { kColumns, kColumnsOfTiles };

// Writes layouts from columns: a warp takes 128 rows of four words of four scales. A lane takes
// four rows, 32 apart, of each word, or with kColumns four such fours of rows of one word.
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

// Writes kPadded from rows: a thread copies sixteen scales twice.
constexpr int kPadThreads = 128, kPadRuns = 2;

template <int kAlignment>
__global__ void __launch_bounds__(kPadThreads)
    pad_rows(const __grid_constant__ Scales in, uint32_t row_runs, int64_t runs, uint32_t* out) {
  const int64_t quads = (in.m.cols + 3) / 4;
  int64_t row[kPadRuns], quad[kPadRuns];
  uint32_t word[kPadRuns][1][4];
#pragma unroll
  for (int k = 0; k < kPadRuns; ++k) {
    const uint32_t i = (blockIdx.x * kPadRuns + k) * kPadThreads + threadIdx.x;
    row[k] = i / row_runs;
    quad[k] = int64_t{i - uint32_t(row[k]) * row_runs} * 4;
    in.load_rows<kAlignment>(row[k], 0, 4 * quad[k], word[k]);
  }
#pragma unroll
  for (int k = 0; k < kPadRuns; ++k) {
    if (row[k] * row_runs >= runs) return;
    uint32_t* to = out + row[k] * quads + quad[k];
    if (quads % 4 == 0) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(word[k][0]);
    } else {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        if (quad[k] + w < quads) to[w] = word[k][0][w];
      }
    }
  }
}

// Transposes float32 scales: a thread takes four rows of four; kAcross such squares lie side by
// side in a warp.
constexpr int kFloatThreads = 128, kAcross = 4, kFloatRows = kFloatThreads / kAcross * 4;

template <bool kVectors>
__global__ void __launch_bounds__(kFloatThreads)
    convert_floats(const __grid_constant__ Scales in, uint32_t block_columns, uint32_t* out) {
  const uint32_t block_row = blockIdx.x / block_columns;
  const int64_t r = int64_t{block_row} * kFloatRows + threadIdx.x / kAcross * 4;
  const int64_t c =
      int64_t{blockIdx.x - block_row * block_columns} * (4 * kAcross) + threadIdx.x % kAcross * 4;
  uint32_t word[4][4];
  if constexpr (kVectors) {
    in.load_rows<16>(r, 1, c, word);
  } else {
    const auto* from = reinterpret_cast<const uint32_t*>(in.m.data);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const bool exists = r + k < in.m.rows && c + x < in.m.cols;
        word[k][x] = exists ? from[in.index(r + k, c + x)] : 0;
      }
    }
  }
  const int64_t pitch = (in.m.rows + 3) / 4 * 4;
  if (r >= pitch) return;
#pragma unroll
  for (int x = 0; x < 4; ++x) {
    if (c + x < in.m.cols) {
      *reinterpret_cast<uint4*>(out + (c + x) * pitch + r) =
          make_uint4(word[0][x], word[1][x], word[2][x], word[3][x]);
    }
  }
}

// One thread per scale, in the order of the compact ones.
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

// One thread per scale: it writes four bytes, or as many as the row has.
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

// Calls body(std::integral_constant) with the alignment.
template <class Body>
void with_alignment(const Scales& scales, Body&& body) {
  switch (scales.alignment()) {
    case 16:
      return body(std::integral_constant<int, 16>{});
    case 4:
      return body(std::integral_constant<int, 4>{});
    default:
      return body(std::integral_constant<int, 1>{});
  }
}

}  // namespace

void convert_scales_cuda(const ScaleMatrix& in, ScaleLayout layout, uint8_t* out,
                         const Stream& stream) {
  const char* name = "convert_scales";
  const Scales scales(in);
  auto* words = reinterpret_cast<uint32_t*>(out);
  const int64_t tiles = blocks_for(in.rows, 128);
  if (layout == ScaleLayout::kSm90MnMajor) {
    const int64_t columns = blocks_for(in.cols, 4 * kAcross);
    const bool vectors = in.col_stride == 1 && scales.alignment() == 16;
    return launch(name, vectors ? convert_floats<true> : convert_floats<false>,
                  {blocks_for(in.rows, kFloatRows) * columns, kFloatThreads}, stream, scales,
                  static_cast<uint32_t>(columns), words);
  }
  const bool swizzled = layout == ScaleLayout::kSm100Swizzled;
  const int64_t columns = blocks_for(in.cols, 16);
  if (in.col_stride == 1) {
    return with_alignment(scales, [&](auto alignment) {
      if (swizzled) {
        const int64_t wide = blocks_for(in.cols, 16 * kLanes);
        launch(name, swizzle_rows<alignment.value>, {tiles * wide, 32 * kLanes}, stream, scales,
               static_cast<uint32_t>(wide), reinterpret_cast<uint4*>(out));
      } else {
        const int64_t runs = tiles * 128 * columns;
        launch(name, pad_rows<alignment.value>,
               {blocks_for(runs, kPadRuns * kPadThreads), kPadThreads}, stream, scales,
               static_cast<uint32_t>(columns), runs, words);
      }
    });
  }
  const auto kernel =
      in.row_block == 1
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
