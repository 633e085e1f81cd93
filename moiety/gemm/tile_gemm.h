// Matrix products on GPUs by tiles, for everything that gemm.h and grouped_gemm.h allow: one launch
// computes one product, or those of many groups whose sizes are read on the GPU. Internal to
// moiety/gemm.
//
// Tensor cores multiply bf16 operands with fp32 accumulators, over the reduction in steps of 16
// from its start, ascending. fp32 operands have the chain of gemm.h, so the bits of the reference.
// Nothing about an element depends on the tile that it lies in.
#pragma once

#include <algorithm>

#include "moiety/base/stream.h"
#include "moiety/gemm/gemm_block.h"

namespace moiety::gemm {

// The size of a product that its group determines: none, the output's rows (and those of `a`), or
// the reduction.
enum class Ragged { kNone, kRows, kReduction };

// One number, or one in device memory for each group.
struct TileFactor {
  float value = 1;
  const float* data = nullptr;
  int64_t stride = 0;
};

// Groups `first` to `first + groups - 1`.
struct TileGroups {
  const int64_t* begin = nullptr;
  const int64_t* count = nullptr;  // null if groups are tight
  int64_t first = 0, groups = 1, capacity = 0;
};

struct TileGemm {
  GemmOp op = GemmOp::kTN;
  DType dtype = DType::kBFloat16;  // dtype of a and b
  Ragged ragged = Ragged::kNone;
  TileGroups groups;
  int64_t m = 0, n = 0, k = 0;  // the ragged one is ignored
  BlockOperand a, b;
  BlockScales a_scales, b_scales;
  int64_t b_scales_group = 0;  // elements from one group to the next
  TileFactor a_scale, b_scale, alpha, beta;
  BlockEpilogue epilogue;  // its four factors are those above

  // The matrix of each group: b with kRows, out with kReduction. Group first + e has pointers[e]
  // or, without pointers, lies e * group_stride elements further.
  static constexpr int64_t kPointers = 256;
  bool indexed = false;
  int64_t group_stride = 0;
  void* pointers[kPointers];
};

// An upper bound of the number of tiles, whatever the sizes of groups.
inline int64_t tile_bound(const TileGemm& g, int64_t rows, int64_t columns) {
  const auto pieces = [](int64_t n, int64_t size) { return (n + size - 1) / size; };
  const TileGroups& all = g.groups;
  const int64_t row_tiles = g.ragged == Ragged::kRows
                                ? all.capacity / rows + std::min(all.groups, all.capacity)
                                : pieces(g.m, rows) * all.groups;
  return row_tiles * pieces(g.n, columns);
}

// Zero sizes are legal; fp64 is Error(kUnsupported).
void tile_gemm_cuda(const TileGemm& gemm, const Stream& stream);
// The two implementations.
void tile_gemm_bf16_cuda(const TileGemm& gemm, const Stream& stream);
void tile_gemm_fp32_cuda(const TileGemm& gemm, const Stream& stream);

}  // namespace moiety::gemm
