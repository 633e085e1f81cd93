// Parts that the kernels of the partial cast share. A warp works on a strip, up to 32 rows x 128
// columns of a matrix, whose elements its threads take in quads: four elements of a row, side by
// side from lane to lane, so that loads and stores of a warp are runs of memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "moiety/base/buffer.h"
#include "moiety/quant/partial_cast/partial_cast_cuda.h"
#include "moiety/quant/partial_cast/partial_cast_scales.h"
#include "moiety/quant/quantize/quantize_scales.cuh"
#include "moiety/quant/quantize/quantize_source.cuh"

namespace moiety::quant::device {

using detail::kStripCols;
using detail::kStripRows;
using detail::PartialArrays;
using detail::PartialBlocks;
using detail::PartialItem;
using detail::PartialScales;
using detail::PartialTile;

constexpr int kQuad = 4;           // elements of a row that a thread holds
constexpr int kPartialWarps = 4;   // warps of a block
constexpr int kPieceScales = 512;  // scales that a warp stores in a piece

// The way in which the elements of a strip are read.
enum class Access {
  kQuads,     // all are owned, quads are aligned
  kElements,  // all are owned
  kEdges,     // some may not be owned
};

// An item with its arrays. `origin` is the place of element `start` in the codes of the whole.
struct PartialJob {
  PartialItem item;
  PartialArrays arrays;
  int64_t origin;
};

// All work of a rank, in pieces for one warp each.
struct PartialWork {
  const PartialJob* jobs = nullptr;
  const PartialTile* strips = nullptr;
  const PartialScales* pieces = nullptr;
  int64_t job_count = 0, strip_count = 0, piece_count = 0;
};

__device__ inline int lane() { return threadIdx.x % 32; }
__device__ inline int64_t warp_number() {
  return int64_t{blockIdx.x} * kPartialWarps + threadIdx.x / 32;
}

template <class T>
using Quad = Elements<T, kQuad>;

template <class T>
__device__ Quad<T> load_quad(const T* p) {
  if constexpr (sizeof(T) == 4) {
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(p));
    return {v.x, v.y, v.z, v.w};
  } else {
    const uint2 v = __ldg(reinterpret_cast<const uint2*>(p));
    return {v.x, v.y};
  }
}
// Loads the elements at p whose bit in `mask` is set; the others are +0.
template <class T>
__device__ Quad<T> load_elements(const T* p, uint32_t mask) {
  Quad<T> out{};
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    if (!(mask >> i & 1)) continue;
    if constexpr (sizeof(T) == 4) {
      out.word[i] = __ldg(reinterpret_cast<const uint32_t*>(p) + i);
    } else {
      const uint32_t bits = __ldg(reinterpret_cast<const uint16_t*>(p) + i);
      out.word[i / 2] |= bits << 16 * (i % 2);
    }
  }
  return out;
}

// A thread's column of quads.
template <class T>
struct Strip {
  const T* x;     // the quad in the first row; elements that are not owned are not read
  int64_t cols;   // elements from row to row
  int64_t first;  // number of the quad's first element among the owned ones,
  int64_t owned;  // and how many are owned
  int rows;       // rows of the strip
  int existing;   // elements of the quad that exist in the matrix

  static __device__ Strip of(const PartialJob& job, const PartialTile& tile) {
    const PartialItem& item = job.item;
    const int column = lane() * kQuad;
    Strip s;
    s.cols = item.cols;
    s.first = tile.row * item.cols + tile.col + column - item.start;
    s.owned = item.end - item.start;
    s.x = static_cast<const T*>(job.arrays.master) + s.first;
    s.rows = int(tile.rows);
    s.existing = min(max(int(tile.cols) - column, 0), kQuad);
    return s;
  }
  // The elements of the quad in row r that exist and are owned, as a mask.
  template <Access kAccess>
  __device__ uint32_t mask(int r) const {
    if (r >= rows) return 0;
    if constexpr (kAccess != Access::kEdges) return (1u << existing) - 1;
    const int64_t at = first + r * cols;
    const int begin = int(min(max(-at, int64_t{0}), int64_t{kQuad}));
    const int end = int(min(max(owned - at, int64_t{0}), int64_t{existing}));
    return begin < end ? (1u << end) - (1u << begin) : 0;
  }
  // Loads n rows from row r on.
  template <Access kAccess, int n>
  __device__ void load(int r, Quad<T> (&out)[n]) const {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const T* p = x + (r + i) * cols;
      const uint32_t m = mask<kAccess>(r + i);
      if constexpr (kAccess == Access::kQuads) {
        out[i] = m ? load_quad(p) : Quad<T>{};
      } else {
        out[i] = load_elements(p, m);
      }
    }
  }
};

__device__ inline Access access_of(const PartialJob& job, const PartialTile& tile) {
  const PartialItem& item = job.item;
  const int64_t first = tile.row * item.cols + tile.col;
  const int64_t last = first + (tile.rows - 1) * item.cols + tile.cols;
  if (first < item.start || last > item.end) return Access::kEdges;
  const int bytes = job.arrays.bf16_master ? 2 : 4;
  const uintptr_t at =
      reinterpret_cast<uintptr_t>(job.arrays.master) + uintptr_t(first - item.start) * bytes;
  const bool aligned = (tile.cols | item.cols) % kQuad == 0 && at % (kQuad * bytes) == 0;
  return aligned ? Access::kQuads : Access::kElements;
}

// Calls body(std::integral_constant) with the access.
template <class Body>
__device__ void with_access(Access access, Body&& body) {
  if (access == Access::kQuads) {
    body(std::integral_constant<Access, Access::kQuads>{});
  } else if (access == Access::kElements) {
    body(std::integral_constant<Access, Access::kElements>{});
  } else {
    body(std::integral_constant<Access, Access::kEdges>{});
  }
}

}  // namespace moiety::quant::device

namespace moiety::quant::detail {

struct PartialGpuTable {
  Buffer jobs, strips, pieces;
  device::PartialWork work;
};

}  // namespace moiety::quant::detail
