// Matrix products on GPUs by tiles, for everything that gemm.h and grouped_gemm.h allow: one launch
// computes one product, or those of many groups whose sizes are read on the GPU. The kernel is a
// pure choice from lists of all kernels, so that tests hold it without a GPU. Internal to
// moiety/gemm.
//
// Tensor cores multiply bf16 operands with fp32 accumulators, over the reduction in steps of 16
// from its start, ascending. fp32 operands have the chain of gemm.h, so the bits of the reference.
// Nothing about an element depends on the tile that it lies in.
#pragma once

#include <algorithm>
#include <array>

#include "moiety/base/gpu.h"
#include "moiety/gemm/product.h"
#include "moiety/quant/quantize_group.h"

namespace moiety::gemm {

// A product as kernels take it, with the matrix of each group: b with kRows, out with kReduction.
// Group first + e has pointers[e] or, without pointers, lies e * group_stride elements further.
struct TileGemm : Product {
  static constexpr int64_t kPointers = 256;
  bool indexed = false;
  int64_t group_stride = 0;
  void* pointers[kPointers] = {};
};

// The rows that a group claims, counted from `all.first`. Sizes are read where they lie.
MOIETY_HD inline quant::Claim claim(const ProductGroups& all, int64_t group) {
  if (!all.begin) return {0, all.capacity, true};
  const int64_t e = all.first + group;
  return quant::claim(all.begin[e], all.begin[e + 1], all.count ? all.count + e : nullptr,
                      all.capacity);
}

// An upper bound of the number of tiles, whatever the sizes of groups.
inline int64_t tile_bound(const Product& g, int64_t rows, int64_t columns) {
  const auto pieces = [](int64_t n, int64_t size) { return (n + size - 1) / size; };
  const ProductGroups& all = g.groups;
  const int64_t row_tiles = g.ragged == Ragged::kRows
                                ? all.capacity / rows + std::min(all.groups, all.capacity)
                                : pieces(g.m, rows) * all.groups;
  return row_tiles * pieces(g.n, columns);
}

// How many multiprocessors of a GPU the product may take.
inline int64_t multiprocessors_of(const Product& g, const GpuProperties& gpu) {
  return g.sm_limit > 0 ? std::min(g.sm_limit, gpu.multiprocessors) : gpu.multiprocessors;
}

struct TileKernel {
  DType dtype;
  GemmOp op;
  bool scaled;  // operands have block scales
  bool small;   // fp32: tiles for products of few elements
  friend constexpr bool operator==(const TileKernel&, const TileKernel&) = default;
};

// One list a source file: tile_gemm_bf16_cuda.cu, tile_gemm_fp32_cuda.cu.
inline constexpr std::array kBf16TileKernels = {
    TileKernel{DType::kBFloat16, GemmOp::kTN, true, false},
    TileKernel{DType::kBFloat16, GemmOp::kTN, false, false},
    TileKernel{DType::kBFloat16, GemmOp::kNN, true, false},
    TileKernel{DType::kBFloat16, GemmOp::kNN, false, false},
    TileKernel{DType::kBFloat16, GemmOp::kNT, false, false},
};
inline constexpr std::array kFp32TileKernels = {
    TileKernel{DType::kFloat32, GemmOp::kTN, true, false},
    TileKernel{DType::kFloat32, GemmOp::kTN, false, true},
    TileKernel{DType::kFloat32, GemmOp::kTN, false, false},
    TileKernel{DType::kFloat32, GemmOp::kNN, true, false},
    TileKernel{DType::kFloat32, GemmOp::kNN, false, true},
    TileKernel{DType::kFloat32, GemmOp::kNN, false, false},
    TileKernel{DType::kFloat32, GemmOp::kNT, false, true},
    TileKernel{DType::kFloat32, GemmOp::kNT, false, false},
};
// Rows and columns of a large fp32 tile.
inline constexpr int kLargeFp32Rows = 128, kLargeFp32Columns = 64;

// `processors`: multiprocessors of the GPU. Throws Error(kUnsupported), naming what is asked for, if no
// list has a kernel for it: fp64 is for CPUs.
TileKernel choose_kernel(const Product& product, int processors);

}  // namespace moiety::gemm
