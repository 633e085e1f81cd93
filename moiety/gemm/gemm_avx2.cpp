#include "moiety/gemm/gemm_block.h"

#if defined(__x86_64__)
#include <algorithm>
#include <array>
#include <immintrin.h>
#include <type_traits>
#include <utility>
#include <vector>

namespace moiety::gemm {

bool avx2_available() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

#pragma GCC push_options
#pragma GCC target("avx2,fma")
namespace {

struct Simd {
  using Vector = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kRows = 6;
  MOIETY_INLINE static Vector zero() { return _mm256_setzero_ps(); }
  MOIETY_INLINE static Vector load(const float* p) { return _mm256_loadu_ps(p); }
  MOIETY_INLINE static Vector broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  MOIETY_INLINE static void store(float* p, Vector v) { _mm256_storeu_ps(p, v); }
  MOIETY_INLINE static Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
};

#include "moiety/gemm/gemm_vector.inc"

}  // namespace

void block_gemm_avx2(const Product& block) {
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
bool avx2_available() { return false; }
void block_gemm_avx2(const Product& block) { block_gemm_reference(block); }
}  // namespace moiety::gemm

#endif
