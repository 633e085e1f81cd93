#include "moiety/base/rng.h"

#include <cmath>

#include "moiety/base/crc32c.h"
#include "moiety/base/math.h"
#include "moiety/base/simd.h"

namespace moiety {
namespace {

// Coefficients of AS 241 (PPND16), highest power first.
constexpr std::array<double, 8> kCentralNum{2.5090809287301226727e+3, 3.3430575583588128105e+4,
                                            6.7265770927008700853e+4, 4.5921953931549871457e+4,
                                            1.3731693765509461125e+4, 1.9715909503065514427e+3,
                                            1.3314166789178437745e+2, 3.3871328727963666080e+0};
constexpr std::array<double, 8> kCentralDen{5.2264952788528545610e+3, 2.8729085735721942674e+4,
                                            3.9307895800092710610e+4, 2.1213794301586595867e+4,
                                            5.3941960214247511077e+3, 6.8718700749205790830e+2,
                                            4.2313330701600911252e+1, 1.0};
constexpr std::array<double, 8> kTailNum{7.7454501427834140764e-4,  2.27238449892691845833e-2,
                                         2.41780725177450611770e-1, 1.27045825245236838258e+0,
                                         3.64784832476320460504e+0, 5.76949722146069140550e+0,
                                         4.63033784615654529590e+0, 1.42343711074968357734e+0};
constexpr std::array<double, 8> kTailDen{1.05075007164441684324e-9, 5.47593808499534494600e-4,
                                         1.51986665636164571966e-2, 1.48103976427480074590e-1,
                                         6.89767334985100004550e-1, 1.67638483018380384940e+0,
                                         2.05319162663775882187e+0, 1.0};

MOIETY_INLINE double polynomial(const std::array<double, 8>& c, double r) {
  double v = c[0];
  for (int i = 1; i < 8; ++i) v = std::fma(v, r, c[i]);
  return v;
}

MOIETY_INLINE float normal(uint32_t word) {
  const double p = (static_cast<double>(word) + 0.5) * 0x1p-32;  // exact
  const double q = p - 0.5;
  if (std::fabs(q) <= 0.425) {
    const double r = 0.180625 - q * q;
    return static_cast<float>(polynomial(kCentralNum, r) * q / polynomial(kCentralDen, r));
  }
  // p is at least 2^-33, so sqrt(-log p) < 4.8 and the far tail of AS 241 is never reached.
  const double r = std::sqrt(-log_positive(q < 0 ? p : 1.0 - p)) - 1.6;
  const double x = polynomial(kTailNum, r) / polynomial(kTailDen, r);
  return static_cast<float>(q < 0 ? -x : x);
}

MOIETY_INLINE PhiloxBlock init_words(uint64_t seed, uint32_t tensor, uint64_t block) {
  return philox(rng_key(seed, RngDomain::kInit),
                {static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), tensor, 0});
}

}  // namespace

uint32_t tensor_id(std::string_view name) { return crc32c(name); }

float normal_from_word(uint32_t word) { return normal(word); }

float init_normal(uint64_t seed, uint32_t tensor, uint64_t i) {
  return normal(init_words(seed, tensor, i >> 2)[i & 3]);
}

// The SIMD clones have an fma instruction; elsewhere fma is a call.
MOIETY_SIMD_CLONES
void init_normals(uint64_t seed, uint32_t tensor, uint64_t first, int64_t n, float scale,
                  float* out) {
  for (int64_t i = 0; i < n;) {
    const uint64_t at = first + static_cast<uint64_t>(i);
    const PhiloxBlock words = init_words(seed, tensor, at >> 2);
    for (uint64_t w = at & 3; w < 4 && i < n; ++w, ++i) out[i] = scale * normal(words[w]);
  }
}

}  // namespace moiety
