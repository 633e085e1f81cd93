#include "moiety/gemm/gemm_block.h"

#if defined(__x86_64__)
#include <algorithm>
#include <array>
#include <immintrin.h>
#include <type_traits>
#include <utility>
#include <vector>

namespace moiety::gemm {

bool avx512_available() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512vl,avx512bw,avx512dq")
namespace {

struct Simd {
  using Vector = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kRows = 12;
  MOIETY_INLINE static Vector zero() { return _mm512_setzero_ps(); }
  MOIETY_INLINE static Vector load(const float* p) { return _mm512_loadu_ps(p); }
  MOIETY_INLINE static Vector broadcast(const float* p) { return _mm512_set1_ps(*p); }
  MOIETY_INLINE static void store(float* p, Vector v) { _mm512_storeu_ps(p, v); }
  MOIETY_INLINE static Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
};

#include "moiety/gemm/gemm_vector.inc"

}  // namespace

void block_gemm_avx512(const Product& block) {
  if (block.dtype == DType::kFloat32) {
    block_gemm_vector<float>(block);
  } else {
    block_gemm_vector<bf16>(block);
  }
}
#pragma GCC pop_options

}  // namespace moiety::gemm

#else

namespace moiety::gemm {
bool avx512_available() { return false; }
void block_gemm_avx512(const Product& block) { block_gemm_reference(block); }
}  // namespace moiety::gemm

#endif
