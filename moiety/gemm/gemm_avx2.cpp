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

// Eight elements as floats.
MOIETY_INLINE __m256 load8(const float* p) { return _mm256_loadu_ps(p); }
MOIETY_INLINE __m256 load8(const bf16* p) {
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}

struct Simd {
  using Vector = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kRows = 6;
  MOIETY_INLINE static Vector zero() { return _mm256_setzero_ps(); }
  MOIETY_INLINE static Vector load(const float* p) { return _mm256_loadu_ps(p); }
  MOIETY_INLINE static Vector broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  MOIETY_INLINE static void store(float* p, Vector v) { _mm256_storeu_ps(p, v); }
  MOIETY_INLINE static Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
  // The first kRows of kLanes elements, as floats.
  template <class T>
  MOIETY_INLINE static void store_rows(float* out, const T* in) {
    const __m256 v = load8(in);
    _mm_storeu_ps(out, _mm256_castps256_ps128(v));
    _mm_storel_pi(reinterpret_cast<__m64*>(out + 4), _mm256_extractf128_ps(v, 1));
  }
};

#include "moiety/gemm/gemm_vector.inc"

}  // namespace

void block_gemm_avx2(const BlockGemm& block) {
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
void block_gemm_avx2(const BlockGemm& block) { block_gemm_reference(block); }
}  // namespace moiety::gemm

#endif
