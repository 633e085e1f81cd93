// Launches as values. A constexpr list says which kernels of an operation exist, as plain data, so
// that the choice among them is a function that tests hold without a GPU; from the same list comes
// the launch of the chosen one.
#pragma once

#include <array>
#include <cstddef>
#include <utility>

#include "moiety/base/launch.cuh"

namespace moiety {

template <class... Params>
struct KernelStart {
  void (*kernel)(Params...) = nullptr;
  LaunchShape shape;
};

// make.operator()<kernel>() of the chosen kernel. All kernels of the list are instantiated; one
// that is not in it has no launch.
template <const auto& kList, class Kernel, class Make>
auto start_of(const Kernel& chosen, Make&& make) {
  return [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
    decltype(make.template operator()<kList[0]>()) out;
    const bool listed =
        ((kList[kIndex] == chosen && (out = make.template operator()<kList[kIndex]>(), true)) ||
         ...);
    if (!listed) fail(ErrorKind::kUnsupported, "a kernel was chosen that is in no list");
    return out;
  }
  (std::make_index_sequence<kList.size()>());
}

}  // namespace moiety
