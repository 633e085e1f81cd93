#include "moiety/quant/quantize/ieee_scope.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace moiety::quant {

#if defined(__x86_64__)

IeeeScope::IeeeScope() : before_(_mm_getcsr()) {
  constexpr unsigned kModes = 0x8000u | 0x0040u | 0x6000u;  // FTZ, DAZ, rounding
  if (before_ & kModes) _mm_setcsr(before_ & ~kModes);
}
IeeeScope::~IeeeScope() { _mm_setcsr(before_); }

#else  // modes that nobody is known to change

IeeeScope::IeeeScope() = default;
IeeeScope::~IeeeScope() = default;

#endif

}  // namespace moiety::quant
