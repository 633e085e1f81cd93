// The arithmetic of reduce.h on one element, for hosts and devices.
#pragma once

#include <type_traits>

#include "moiety/base/host_device.h"
#include "moiety/comm/communicator.h"
#include "moiety/formats/bf16.h"
#include "moiety/formats/fp16.h"

namespace moiety::comm {

template <class T>
using Accumulator =
    std::conditional_t<std::is_integral_v<T> || std::is_same_v<T, double>, T, float>;

template <ReduceOp op, class A>
MOIETY_HD_INLINE A combine(A a, A b) {
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

}  // namespace moiety::comm
