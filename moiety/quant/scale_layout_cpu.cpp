// Layouts in tiles of the rows that lie together in them: 128 rows x 4 scales of bytes, 64 rows of
// float32.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "moiety/base/parallel.h"
#include "moiety/base/simd.h"
#include "moiety/quant/scale_layout_job.h"

namespace moiety::quant {
namespace {

constexpr int64_t kTileRows = 128;
constexpr int64_t kFloatRows = 64;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows [r0, r0 + 128) of scales c to c + 3, out[4 * row], pads 0.
void load_bytes(const ScaleMatrix& in, int64_t r0, int64_t c, uint8_t* out) {
  const int64_t rows = std::min(kTileRows, in.rows - r0), cols = std::min<int64_t>(4, in.cols - c);
  if (rows < kTileRows || cols < 4) std::memset(out, 0, 4 * kTileRows);
  if (in.col_stride == 1 && cols == 4) {
    for (int64_t r = 0; r < rows; ++r) std::memcpy(out + 4 * r, in.data + in.index(r0 + r, c), 4);
  } else if (in.row_stride == 1 && in.row_block == 1 && cols == 4) {
    const uint8_t* from = in.data + in.index(r0, c);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < 4; ++i) out[4 * r + i] = from[i * in.col_stride + r];
    }
  } else {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < cols; ++i) out[4 * r + i] = in.data[in.index(r0 + r, c + i)];
    }
  }
}

// Scale rows [r0, r0 + 128) in a layout of bytes.
void convert_bytes(const ScaleMatrix& in, bool swizzled, int64_t r0, uint8_t* out) {
  const int64_t quads = ceil_div(in.cols, 4);
  out += r0 * quads * 4;
  for (int64_t q = 0; q < quads; ++q) {
    alignas(16) uint8_t tile[4 * kTileRows];
    load_bytes(in, r0, 4 * q, tile);
    for (int64_t r = 0; r < kTileRows; ++r) {
      const int64_t at = swizzled ? q * 512 + r % 32 * 16 + r / 32 * 4 : (r * quads + q) * 4;
      std::memcpy(out + at, tile + 4 * r, 4);
    }
  }
}

// Scale rows [r0, r0 + 64) of float32, transposed.
void convert_floats(const ScaleMatrix& in, int64_t r0, uint32_t* out) {
  const uint32_t* from = reinterpret_cast<const uint32_t*>(in.data);
  const int64_t pitch = ceil_div(in.rows, 4) * 4;
  const int64_t end = std::min(r0 + kFloatRows, pitch), filled = std::min(end, in.rows);
  for (int64_t c = 0; c < in.cols; ++c) {
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
  parallel_for(in.rows, kTileRows, [&](int64_t begin, int64_t) {
    convert_bytes(in, layout == ScaleLayout::kSm100Swizzled, begin, out);
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
