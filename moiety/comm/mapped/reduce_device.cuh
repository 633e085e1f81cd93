// The sums of reduce.h on a GPU, one element at a time: the same order, the same rounding.
#pragma once

#include <type_traits>

#include "moiety/comm/communicator.h"
#include "moiety/formats/bf16.h"
#include "moiety/formats/fp16.h"

namespace moiety::comm::mapped {

template <class T>
using Accumulator =
    std::conditional_t<std::is_integral_v<T> || std::is_same_v<T, double>, T, float>;

template <ReduceOp op, class A>
__device__ inline A combine(A a, A b) {
  if constexpr (op == ReduceOp::kSum && std::is_integral_v<A>) {
    using U = std::make_unsigned_t<A>;
    return static_cast<A>(static_cast<U>(a) + static_cast<U>(b));
  } else if constexpr (op == ReduceOp::kSum) {
    return a + b;
  } else if constexpr (op == ReduceOp::kMax) {
    return b > a || b != b ? b : a;
  } else {
    return b < a || b != b ? b : a;
  }
}

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

}  // namespace moiety::comm::mapped
