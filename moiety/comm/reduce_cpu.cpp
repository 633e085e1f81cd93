#include <array>
#include <type_traits>

#include "moiety/base/parallel.h"
#include "moiety/base/simd.h"
#include "moiety/comm/reduce.h"
#include "moiety/comm/reduce_math.h"

namespace moiety::comm {
namespace {

constexpr int64_t kTile = 1024;       // elements whose accumulators stay in the nearest cache
constexpr int64_t kGrain = 64 << 10;  // elements of a task

template <ReduceOp op, class T>
MOIETY_INLINE void reduce_range(T* dst, const T* const* sources, size_t count, int64_t begin,
                                int64_t end) {
  using A = Accumulator<T>;
  std::array<A, kTile> sum;
  for (int64_t at = begin; at < end; at += kTile) {
    const int64_t n = end - at < kTile ? end - at : kTile;
    for (int64_t i = 0; i < n; ++i) sum[i] = static_cast<A>(sources[0][at + i]);
    for (size_t r = 1; r < count; ++r) {
      const T* x = sources[r] + at;
      for (int64_t i = 0; i < n; ++i) sum[i] = combine<op>(sum[i], static_cast<A>(x[i]));
    }
    for (int64_t i = 0; i < n; ++i) dst[at + i] = static_cast<T>(sum[i]);
  }
}

MOIETY_SIMD_CLONES
void sum_float(float* dst, const float* const* sources, size_t count, int64_t begin, int64_t end) {
  reduce_range<ReduceOp::kSum>(dst, sources, count, begin, end);
}

MOIETY_SIMD_CLONES
void sum_bf16(bf16* dst, const bf16* const* sources, size_t count, int64_t begin, int64_t end) {
  reduce_range<ReduceOp::kSum>(dst, sources, count, begin, end);
}

template <ReduceOp op, class T>
void run_range(T* dst, const T* const* sources, size_t count, int64_t begin, int64_t end) {
  if constexpr (op == ReduceOp::kSum && std::is_same_v<T, float>) {
    sum_float(dst, sources, count, begin, end);
  } else if constexpr (op == ReduceOp::kSum && std::is_same_v<T, bf16>) {
    sum_bf16(dst, sources, count, begin, end);
  } else {
    reduce_range<op>(dst, sources, count, begin, end);
  }
}

template <class T>
void reduce_typed(void* dst, std::span<const void* const> sources, int64_t n, ReduceOp op) {
  const auto* typed = reinterpret_cast<const T* const*>(sources.data());
  parallel_for(n, kGrain, [&](int64_t begin, int64_t end) {
    T* out = static_cast<T*>(dst);
    switch (op) {
      case ReduceOp::kSum:
        return run_range<ReduceOp::kSum>(out, typed, sources.size(), begin, end);
      case ReduceOp::kMax:
        return run_range<ReduceOp::kMax>(out, typed, sources.size(), begin, end);
      case ReduceOp::kMin:
        return run_range<ReduceOp::kMin>(out, typed, sources.size(), begin, end);
    }
  });
}

}  // namespace

void reduce(void* dst, std::span<const void* const> sources, int64_t n, DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kFloat64:
      return reduce_typed<double>(dst, sources, n, op);
    case DType::kFloat32:
      return reduce_typed<float>(dst, sources, n, op);
    case DType::kBFloat16:
      return reduce_typed<bf16>(dst, sources, n, op);
    case DType::kFloat16:
      return reduce_typed<fp16>(dst, sources, n, op);
    case DType::kInt64:
      return reduce_typed<int64_t>(dst, sources, n, op);
    case DType::kInt32:
      return reduce_typed<int32_t>(dst, sources, n, op);
    case DType::kUInt8:
      return reduce_typed<uint8_t>(dst, sources, n, op);
    default:
      fail(ErrorKind::kUnsupported, "reduce: {} cannot be reduced", name(dtype));
  }
}

}  // namespace moiety::comm
