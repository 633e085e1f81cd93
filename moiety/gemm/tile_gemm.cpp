#include "moiety/gemm/tile_gemm.h"

#include "moiety/base/error.h"

namespace moiety::gemm {
namespace {

const char* name(GemmOp op) {
  return op == GemmOp::kTN ? "kTN" : op == GemmOp::kNN ? "kNN" : "kNT";
}

template <class List>
bool contains(const List& list, const TileKernel& kernel) {
  return std::find(list.begin(), list.end(), kernel) != list.end();
}

}  // namespace

TileKernel choose_kernel(const Product& product, int processors) {
  TileKernel kernel{product.dtype, product.op, product.a_scales.data != nullptr, false};
  const int64_t large = tile_bound(product, kLargeFp32Rows, kLargeFp32Columns);
  kernel.small =
      kernel.dtype == DType::kFloat32 && !kernel.scaled && large < 2 * int64_t{processors};
  if (contains(kBf16TileKernels, kernel) || contains(kFp32TileKernels, kernel)) return kernel;
  fail(ErrorKind::kUnsupported, "gemm: no kernel of a GPU multiplies {} operands, {}{}",
       moiety::name(kernel.dtype), name(kernel.op), kernel.scaled ? " with block scales" : "");
}

}  // namespace moiety::gemm
