// Which code computes the casts of moiety/quant on a CPU: for tests and measurements, since all
// paths give the same bits and the best one is taken by itself.
//
//    kReference   scalar, an element at a time: the code that defines the bits
//    kPortable    loops that the compiler vectorizes, for SSE2, AVX2 and AVX-512, of which the
//                 program takes the best when it starts (base/simd.h; tests_quant_sse2 and
//                 tests_quant_avx2 are programs that have no better one)
//    kAvx2        the same, with hand-written loops where they are faster
//
// Amax, quantize, dequantize, transposes, conversions of scales and partial casts have all three;
// compact_scales, fp8_block_to_mxfp8 and delayed scaling have one path.
#pragma once

#include <cstdint>
#include <span>

namespace moiety::quant {

enum class CpuPath : uint8_t { kReference, kPortable, kAvx2 };
// "reference", "portable" or "avx2".
const char* name(CpuPath path);

// The paths of this processor, ascending; the last one is the best, which is taken by itself.
std::span<const CpuPath> cpu_paths();

// While it exists, casts that run on a CPU take this path, on every thread. One at a time, and not
// while another thread casts. Throws Error(kUnsupported) if the processor does not have the path.
class UseCpuPath {
 public:
  explicit UseCpuPath(CpuPath path);
  ~UseCpuPath();
  UseCpuPath(const UseCpuPath&) = delete;
  UseCpuPath& operator=(const UseCpuPath&) = delete;
};

namespace detail {

// Whether casts take this path now. Not inline: files that are compiled for AVX2 as a whole ask.
bool by_reference();
bool by_avx2();

}  // namespace detail
}  // namespace moiety::quant
