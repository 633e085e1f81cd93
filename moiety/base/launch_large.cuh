// Launches of kernels with much shared memory that steps launch again and again: the run time is told
// once how much a kernel may take, which costs 1 to 3 us, and arguments of kilobytes are not copied
// on the way to it.
#pragma once

#include "moiety/base/launch.cuh"

namespace moiety {
namespace detail {
void launch_large(const char* name, const void* kernel, const LaunchShape& shape,
                  const Stream& stream, void** arguments);
}  // namespace detail

// As `launch`, with arguments of the kernel's very types.
template <class... Params>
void launch_large(const char* name, void (*kernel)(Params...), const LaunchShape& shape,
                  const Stream& stream, const Params&... arguments) {
  void* list[] = {const_cast<Params*>(&arguments)...};
  detail::launch_large(name, reinterpret_cast<const void*>(kernel), shape, stream, list);
}

}  // namespace moiety
