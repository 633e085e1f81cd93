// Chooses the instance of a kernel for a reduction.
#pragma once

#include "moiety/comm/reduce_math.h"

namespace moiety::comm::mapped {

// f.operator()<T, op>() for the dtype and the operation.
template <class F>
void for_reduction(DType dtype, ReduceOp op, F&& f) {
  const auto with = [&]<class T>() {
    switch (op) {
      case ReduceOp::kSum:
        return f.template operator()<T, ReduceOp::kSum>();
      case ReduceOp::kMax:
        return f.template operator()<T, ReduceOp::kMax>();
      case ReduceOp::kMin:
        return f.template operator()<T, ReduceOp::kMin>();
    }
  };
  switch (dtype) {
    case DType::kFloat64:
      return with.template operator()<double>();
    case DType::kFloat32:
      return with.template operator()<float>();
    case DType::kBFloat16:
      return with.template operator()<bf16>();
    case DType::kFloat16:
      return with.template operator()<fp16>();
    case DType::kInt64:
      return with.template operator()<int64_t>();
    case DType::kInt32:
      return with.template operator()<int32_t>();
    default:
      return with.template operator()<uint8_t>();
  }
}

// The same for each of them.
template <class F>
void for_all_reductions(F&& f) {
  for (const DType dtype : {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16,
                            DType::kInt64, DType::kInt32, DType::kUInt8}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
      for_reduction(dtype, op, f);
    }
  }
}

}  // namespace moiety::comm::mapped
