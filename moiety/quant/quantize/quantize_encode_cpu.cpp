// The encoders of the quantizers' loops: one for finite values, one for any.
#include "moiety/quant/quantize/quantize_encode.h"
#include "moiety/quant/quantize/quantize_loops_avx2.h"

namespace moiety::quant::loops {
namespace {

// The encoder for all values. It is the exception, so one instruction set is enough.
template <class F, bool kStochastic>
struct Any {
  template <class T>
  static void encode(const Row<T>& row, uint8_t* codes) {
    for (int64_t i = 0; i < row.n / 2; ++i) {
      const float even = static_cast<float>(row.x[2 * i]) * row.even[i];
      const float odd = static_cast<float>(row.x[2 * i + 1]) * row.odd[i];
      uint32_t a, b;
      if constexpr (kStochastic) {
        a = F::encode_stochastic(even, row.random[2 * i]);
        b = F::encode_stochastic(odd, row.random[2 * i + 1]);
      } else {
        a = F::encode(even);
        b = F::encode(odd);
      }
      store<F>(codes, i, a | b << kBits<F>);
    }
  }
};

// These are no templates, since functions of several instruction sets cannot be.
#define MOIETY_ENCODE_LOOPS(T, F)                                                             \
  MOIETY_SIMD_CLONES void nearest_##T##_##F(const Rows& x, const PairFactors& factor,         \
                                            const uint8_t* random, uint8_t* codes) {          \
    encode_rows<Finite<F, false>, F, T>(x, factor, random, codes);                            \
  }                                                                                           \
  MOIETY_SIMD_CLONES void stochastic_##T##_##F(const Rows& x, const PairFactors& factor,      \
                                               const uint8_t* random, uint8_t* codes) {       \
    encode_rows<Finite<F, true>, F, T>(x, factor, random, codes);                             \
  }                                                                                           \
  Encode encode_##T##_##F(bool stochastic, bool finite) {                                     \
    if (!finite) {                                                                            \
      return stochastic ? encode_rows<Any<F, true>, F, T> : encode_rows<Any<F, false>, F, T>; \
    }                                                                                         \
    return stochastic ? stochastic_##T##_##F : nearest_##T##_##F;                             \
  }
MOIETY_ENCODE_LOOPS(float, E2M1)
MOIETY_ENCODE_LOOPS(float, E4M3)
MOIETY_ENCODE_LOOPS(float, E5M2)
MOIETY_ENCODE_LOOPS(bf16, E2M1)
MOIETY_ENCODE_LOOPS(bf16, E4M3)
MOIETY_ENCODE_LOOPS(bf16, E5M2)
#undef MOIETY_ENCODE_LOOPS

}  // namespace

Encode encode(DType input, DType element, bool stochastic, Known known) {
  const bool wide = input == DType::kFloat32, finite = known != Known::kNothing;
  const Encode avx2 = wide ? nullptr : encode_avx2(element, stochastic, known);
  if (avx2) return avx2;
  switch (element) {
    case DType::kE2M1:
      return (wide ? encode_float_E2M1 : encode_bf16_E2M1)(stochastic, finite);
    case DType::kE5M2:
      return (wide ? encode_float_E5M2 : encode_bf16_E5M2)(stochastic, finite);
    default:
      return (wide ? encode_float_E4M3 : encode_bf16_E4M3)(stochastic, finite);
  }
}

}  // namespace moiety::quant::loops
