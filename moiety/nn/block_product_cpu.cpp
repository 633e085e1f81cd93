// The product of small blocks, written with intrinsics: the vectorizer does not keep a tile of
// accumulators in registers.
#include <cmath>

#include "moiety/nn/block_product.h"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moiety::nn {
namespace {

constexpr int kRows = 4, kColumns = 16;

#if defined(__x86_64__)
#define MOIETY_AVX2 __attribute__((target("avx2,fma")))

// A tile of 4 rows and 16 columns of c: eight accumulators, as many as two fma units with a latency
// of four cycles need.
MOIETY_AVX2 inline void tile(const BlockProduct& p, const float* a, const float* b, float* c) {
  __m256 sum[kRows][2];
  for (int i = 0; i < kRows; ++i) {
    for (int h = 0; h < 2; ++h) {
      sum[i][h] = p.accumulate ? _mm256_loadu_ps(c + i * p.c_m + 8 * h) : _mm256_setzero_ps();
    }
  }
  const int64_t a_m = p.a_m, a_k = p.a_k, b_k = p.b_k;
  for (int64_t k = 0; k < p.k; ++k, a += a_k, b += b_k) {
    const __m256 b0 = _mm256_loadu_ps(b), b1 = _mm256_loadu_ps(b + 8);
    for (int i = 0; i < kRows; ++i) {
      const __m256 v = _mm256_broadcast_ss(a + i * a_m);
      sum[i][0] = _mm256_fmadd_ps(v, b0, sum[i][0]);
      sum[i][1] = _mm256_fmadd_ps(v, b1, sum[i][1]);
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int h = 0; h < 2; ++h) _mm256_storeu_ps(c + i * p.c_m + 8 * h, sum[i][h]);
  }
}

MOIETY_AVX2 void product_avx2(const BlockProduct& p) {
  for (int64_t j = 0; j < p.n; j += kColumns) {
    for (int64_t i = 0; i < p.m; i += kRows) {
      tile(p, p.a + i * p.a_m, p.b + j / kColumns * p.b_n, p.c + i * p.c_m + j);
    }
  }
}

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#else
void product_avx2(const BlockProduct& p) { block_product_portable(p); }
bool has_avx2() { return false; }
#endif

}  // namespace

void block_product_portable(const BlockProduct& p) {
  for (int64_t i = 0; i < p.m; ++i) {
    for (int64_t j = 0; j < p.n; ++j) {
      const float* b = p.b + j / kColumns * p.b_n + j % kColumns;
      float& c = p.c[i * p.c_m + j];
      float sum = p.accumulate ? c : 0.0f;
      for (int64_t k = 0; k < p.k; ++k) {
        sum = std::fma(p.a[i * p.a_m + k * p.a_k], b[k * p.b_k], sum);
      }
      c = sum;
    }
  }
}

void block_product(const BlockProduct& p) {
  static const bool fast = has_avx2();
  fast ? product_avx2(p) : block_product_portable(p);
}

}  // namespace moiety::nn
