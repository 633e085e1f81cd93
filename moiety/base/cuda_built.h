// Whether this build has CUDA, for sources of the library that include this; they alone are told,
// when the build is configured (moiety_say_cuda in cmake/targets.cmake): where kCudaBuilt is not
// declared, configure again.
//
//   if (check_devices("norm", {{"x", x}, {"y", y}}, stream)) {
//     if constexpr (kCudaBuilt) return norm_cuda(x, y, stream);
//     fail_without_cuda("norm");
//   }
//
// A discarded statement uses no function: a build without CUDA links no norm_cuda and needs none.
#pragma once

#include "moiety/base/gpu.h"  // fail_without_cuda

namespace moiety {

#ifdef MOIETY_CUDA_BUILT
inline constexpr bool kCudaBuilt = MOIETY_CUDA_BUILT;
#endif

}  // namespace moiety
