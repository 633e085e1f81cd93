// Maps by which the copy engine finds tiles of matrices in a GPU's memory. Places have four
// coordinates (device.cuh): a column, a row, and two that choose the matrix or end the rows.
#pragma once

#include <cstdint>
#include <cuda.h>

#include "moiety/base/dtype.h"

namespace moiety::gemm::sm90 {

// A box of the map: 128 bytes of each row, the width of a swizzled row in shared memory.
inline constexpr int64_t kBoxBytes = 128;
inline constexpr int64_t kNarrowBytes = 64;  // or so many, of which pieces of 16 are swizzled

// Rows of a buffer that belong to groups. A place {c, kRaggedEnd - n, kRaggedEnd, r + n} is column c
// of row r, of which n rows exist: rows after them are read as zeros and never written. The map's
// rows end at kRaggedEnd; the third coordinate takes as many rows off the address again, modulo
// 2^64, and the fourth adds those that are meant.
inline constexpr int32_t kRaggedEnd = 1 << 30;
CUtensorMap ragged_map(const void* rows, DType dtype, int64_t columns, int64_t stride, int box_rows,
                       int64_t box_bytes = kBoxBytes);

// Matrices of equal shape, one a group. `stride`: bytes from one to the next, with places {column,
// row, group, 0}. Without a stride, matrices lie anywhere from `first` on, and bytes b from there
// are the place {column, row, b % kNearBytes / 16, b / kNearBytes}.
inline constexpr int64_t kNearBytes = 1 << 20;
struct MapMatrices {
  const void* first = nullptr;
  DType dtype = DType::kBFloat16;
  int64_t rows = 0, columns = 0;
  int64_t row_stride = 0;  // elements
  int64_t stride = 0;      // bytes
  int64_t groups = 0;
};
CUtensorMap matrix_map(const MapMatrices& matrices, int box_rows);

}  // namespace moiety::gemm::sm90
