// The one description of a matrix product: dense, grouped, or a part of either. gemm() and
// grouped_gemm() check their arguments and make it; engines of the CPU and kernels of the GPU read
// it as it is. Internal to moiety/gemm. Notation: gemm.h, grouped_gemm.h.
#pragma once

#include <cstdint>

#include "moiety/base/dtype.h"
#include "moiety/base/host_device.h"
#include "moiety/gemm/gemm.h"

namespace moiety::gemm {

// A row-major operand. With `source` (not for b of kTN), row r is row source[r] of data, and zeros
// unless 0 <= source[r] < sources.
struct ProductOperand {
  const void* data = nullptr;
  int64_t stride = 0;  // elements from row to row
  const int32_t* source = nullptr;
  int64_t sources = 0;
  int64_t first = 0;  // added to every row index; CPUs alone

  template <class T>
  const T* row(int64_t r) const {  // null: a row of zeros
    r += first;
    if (source) {
      r = source[r];
      if (r < 0 || r >= sources) return nullptr;
    }
    return static_cast<const T*>(data) + r * stride;
  }
};

// One number, or, with `data`, one for each group, read when the product runs.
struct ProductFactor {
  float value = 1;
  const float* data = nullptr;
  int64_t stride = 0;

  MOIETY_HD float of(int64_t group) const { return data ? data[group * stride] : value; }
};

// The operations on an accumulator before it is stored.
struct Epilogue {
  ProductFactor a_scale = {}, b_scale = {};  // scales of the whole operands, applied first
  ProductFactor alpha = {};
  ProductFactor beta = {0};
  void* out = nullptr;
  DType out_dtype = DType::kFloat32;
  int64_t out_stride = 0;
  const void* old = nullptr;  // read if beta != 0
  DType old_dtype = DType::kFloat32;
  int64_t old_stride = 0;
  const void* bias = nullptr;  // one per column, in the operands' dtype; [groups, columns]
  DType bias_dtype = DType::kFloat32;
  const void* bias_scale = nullptr;  // one per row, float; double with double operands
};

// Scales of an operand, one for each block of rows and each slice of the reduction.
struct BlockScales {
  const float* data = nullptr;  // null if there are none
  int64_t stride = 0;           // from one block of rows to the next
  int64_t slice_stride = 0;
  int64_t rows = 1;  // rows of a block

  float at(int64_t row, int64_t slice) const {
    return data[row / rows * stride + slice * slice_stride];
  }
};
inline constexpr int64_t kScaledSlice = 128;  // elements of the reduction

// The size of a product that its group determines: none, the output's rows (and those of `a`), or
// the reduction.
enum class Ragged { kNone, kRows, kReduction };

// Groups `first` to `first + groups - 1` of those whose sizes lie in memory of the device; without
// `begin` one group that has all of the capacity.
struct ProductGroups {
  const int64_t* begin = nullptr;
  const int64_t* count = nullptr;  // null if groups are tight
  int64_t first = 0, groups = 1, capacity = 0;
};

struct Product {
  GemmOp op = GemmOp::kTN;
  DType dtype = DType::kFloat32;  // dtype of a and b
  Ragged ragged = Ragged::kNone;
  ProductGroups groups = {};
  // Rows [row, row + m) and columns [column, column + n); the ragged size is ignored. GPUs take
  // whole products.
  int64_t row = 0, m = 0;
  int64_t column = 0, n = 0;
  int64_t k = 0;
  ProductOperand a = {}, b = {};
  BlockScales a_scales = {}, b_scales = {};  // both or none; not for kNT
  int64_t b_scales_group = 0;                // elements from one group to the next
  Epilogue epilogue = {};
  int sm_limit = 0;  // the most multiprocessors of a GPU that it takes; 0: all

  // Reads the factors of a group, so that they are numbers.
  void read_factors(int64_t group) {
    for (ProductFactor* f :
         {&epilogue.a_scale, &epilogue.b_scale, &epilogue.alpha, &epilogue.beta}) {
      *f = {f->of(group)};
    }
  }
};

// The scales of an operand as a product takes them. `block`: scale.block, or a part of it.
ProductFactor tensor_scale(const OperandScale& scale);
BlockScales block_scales(const OperandScale& scale, const TensorView& block);

}  // namespace moiety::gemm
