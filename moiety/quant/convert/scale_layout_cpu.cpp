// Layouts of scales on CPUs, in tiles of the rows that lie together in a layout: 128 rows x 16 byte
// scales, or 64 rows of float32.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "moiety/base/integer.h"
#include "moiety/base/parallel.h"
#include "moiety/base/simd.h"
#include "moiety/quant/convert/byte_transpose.h"
#include "moiety/quant/quantize/stream_bytes.h"
#include "moiety/quant/scale_layout_job.h"

namespace moiety::quant {
namespace {

constexpr int64_t kTileRows = 128;
constexpr int64_t kFloatRows = 64;

// A part of the matrix with 128 rows of 16 scales, row-major; pads 0.
struct alignas(64) ScaleTile {
  uint8_t at[kTileRows][16];

  MOIETY_INLINE void load(const ScaleMatrix& in, int64_t r0, int64_t c0) {
    const int64_t rows = std::min(kTileRows, in.rows - r0);
    const int64_t cols = std::min<int64_t>(16, in.cols - c0);
    if (rows < kTileRows || cols < 16) std::memset(at, 0, sizeof at);
    if (in.col_stride == 1 && cols == 16) {
      for (int64_t r = 0; r < rows; ++r) std::memcpy(at[r], in.data + in.index(r0 + r, c0), 16);
    } else if (in.row_stride == 1 && in.row_block == 1 && cols == 16 && rows == kTileRows) {
      transpose_bytes(in.data + in.index(r0, c0), in.col_stride, 16, kTileRows, at[0], 16);
    } else {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t i = 0; i < cols; ++i) at[r][i] = in.data[in.index(r0 + r, c0 + i)];
      }
    }
  }
};

using Words4 __attribute__((vector_size(16))) = uint32_t;

// out[j][i] = word j of row i, for i, j < 4.
MOIETY_INLINE void transpose_words(const Words4 (&row)[4], Words4 (&out)[4]) {
  const Words4 a = __builtin_shufflevector(row[0], row[1], 0, 4, 1, 5);
  const Words4 b = __builtin_shufflevector(row[2], row[3], 0, 4, 1, 5);
  const Words4 c = __builtin_shufflevector(row[0], row[1], 2, 6, 3, 7);
  const Words4 d = __builtin_shufflevector(row[2], row[3], 2, 6, 3, 7);
  out[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
  out[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
  out[2] = __builtin_shufflevector(c, d, 0, 1, 4, 5);
  out[3] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
}

// Writes scale rows [r0, r0 + 128) swizzled: in tiles of 512 bytes, in which the words of rows 32
// apart lie together.
MOIETY_INLINE void swizzle(const ScaleMatrix& in, const ByteWriter& writer, int64_t r0,
                           uint8_t* out) {
  const int64_t quads = ceil_div(in.cols, 4);
  for (int64_t q = 0; q < quads; q += 4) {
    ScaleTile tile;
    tile.load(in, r0, 4 * q);
    alignas(64) uint8_t swizzled[4][512];
    for (int64_t r = 0; r < 32; ++r) {
      Words4 row[4], word[4];
      for (int i = 0; i < 4; ++i) std::memcpy(&row[i], tile.at[r + 32 * i], 16);
      transpose_words(row, word);
      for (int i = 0; i < 4; ++i) std::memcpy(swizzled[i] + 16 * r, &word[i], 16);
    }
    writer.write(out + (r0 * quads + q * kTileRows) * 4, swizzled,
                 std::min<int64_t>(4, quads - q) * 512);
  }
}

// Writes scale rows [r0, r0 + 128) as rows of whole words.
MOIETY_INLINE void pad(const ScaleMatrix& in, int64_t r0, uint8_t* out) {
  const int64_t pitch = ceil_div(in.cols, 4) * 4;
  out += r0 * pitch;
  if (in.col_stride == 1) {
    for (int64_t r = 0; r < kTileRows; ++r, out += pitch) {
      const auto filled = static_cast<size_t>(r0 + r < in.rows ? in.cols : 0);
      if (filled > 0) std::memcpy(out, in.data + in.index(r0 + r, 0), filled);
      std::memset(out + filled, 0, static_cast<size_t>(pitch) - filled);
    }
    return;
  }
  for (int64_t c = 0; c < pitch; c += 16) {
    ScaleTile tile;
    tile.load(in, r0, c);
    const auto bytes = static_cast<size_t>(std::min<int64_t>(16, pitch - c));
    for (int64_t r = 0; r < kTileRows; ++r) std::memcpy(out + r * pitch + c, tile.at[r], bytes);
  }
}

MOIETY_SIMD_CLONES void convert_bytes(const ScaleMatrix& in, bool swizzled,
                                      const ByteWriter& writer, int64_t r0, uint8_t* out) {
  swizzled ? swizzle(in, writer, r0, out) : pad(in, r0, out);
}

// Writes scale rows [r0, r0 + 64) of float32, transposed.
MOIETY_SIMD_CLONES void convert_floats(const ScaleMatrix& in, int64_t r0, uint32_t* out) {
  const uint32_t* from = reinterpret_cast<const uint32_t*>(in.data);
  const int64_t pitch = ceil_div(in.rows, 4) * 4;
  const int64_t end = std::min(r0 + kFloatRows, pitch), filled = std::min(end, in.rows);
  int64_t c = 0;
  for (; in.col_stride == 1 && filled == end && c + 4 <= in.cols; c += 4) {
    for (int64_t r = r0; r < end; r += 4) {
      Words4 row[4], col[4];
      for (int i = 0; i < 4; ++i) std::memcpy(&row[i], from + in.index(r + i, c), 16);
      transpose_words(row, col);
      for (int i = 0; i < 4; ++i) std::memcpy(out + (c + i) * pitch + r, &col[i], 16);
    }
  }
  for (; c < in.cols; ++c) {
    uint32_t* to = out + c * pitch;
    for (int64_t r = r0; r < filled; ++r) to[r] = from[in.index(r, c)];
    std::fill(to + filled, to + end, 0u);
  }
}

}  // namespace

void convert_scales_cpu(const ScaleMatrix& in, ScaleLayout layout, uint8_t* out) {
  if (layout == ScaleLayout::kSm90MnMajor) {
    parallel_for(in.rows, kFloatRows, [&](int64_t begin, int64_t) {
      convert_floats(in, begin, reinterpret_cast<uint32_t*>(out));
    });
    return;
  }
  const ByteWriter writer(layout_scales(layout, in.rows, in.cols));
  parallel_for(in.rows, kTileRows, [&](int64_t begin, int64_t) {
    convert_bytes(in, layout == ScaleLayout::kSm100Swizzled, writer, begin, out);
    ByteWriter::finish();
  });
}

void compact_scales_cpu(const uint8_t* in, ScaleLayout layout, const ScaleMatrix& out) {
  parallel_for(out.rows, kTileRows, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t c = 0; c < out.cols; ++c) {
        std::memcpy(out.data + out.width * out.index(r, c),
                    in + out.width * layout_index(layout, out.rows, out.cols, r, c), out.width);
      }
    }
  });
}

void fp8_block_to_mxfp8_cpu(const ScaleMatrix& in, int64_t cols, uint8_t* out, uint32_t* flags) {
  const uint32_t* from = reinterpret_cast<const uint32_t*>(in.data);
  const int64_t pitch = ceil_div(cols, 32);
  parallel_for(in.rows, kTileRows, [&](int64_t begin, int64_t end) {
    bool fault = false;
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t c = 0; c < pitch; ++c) {
        out[r * pitch + c] = exponent_byte(from[in.index(r, c / 4)], &fault);
      }
    }
    if (fault && flags) std::atomic_ref(*flags).fetch_or(kFlagUnrepresentable);
  });
}

}  // namespace moiety::quant
