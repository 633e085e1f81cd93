// Which kernel copies rows to experts on a GPU: a pure choice from a list of all kernels, which
// dispatch_cuda.cu instantiates, so that tests hold it without a GPU. Internal to moiety/moe.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

namespace moiety::moe {

struct CopyKernel {
  int unit;  // bytes that a lane moves at a time
  friend constexpr bool operator==(const CopyKernel&, const CopyKernel&) = default;
};
inline constexpr std::array kCopyKernels = {CopyKernel{16}, CopyKernel{4}, CopyKernel{2},
                                            CopyKernel{1}};

// The widest unit that all rows are made of: `strides` has their lengths, too, in bytes.
inline CopyKernel choose_copy(std::initializer_list<const void*> addresses,
                              std::initializer_list<int64_t> strides) {
  uintptr_t all = 0;
  for (const void* address : addresses) all |= reinterpret_cast<uintptr_t>(address);
  for (const int64_t stride : strides) all |= static_cast<uintptr_t>(stride);
  for (const CopyKernel& kernel : kCopyKernels) {
    if (all % static_cast<uintptr_t>(kernel.unit) == 0) return kernel;
  }
  return kCopyKernels.back();
}

}  // namespace moiety::moe
