#include "moiety/quant/cpu_path.h"

#include <array>
#include <atomic>

#include "moiety/base/error.h"

namespace moiety::quant {
namespace {

constexpr std::array kAll{CpuPath::kReference, CpuPath::kPortable, CpuPath::kAvx2};

bool has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2");
#else
  return false;
#endif
}

std::atomic<CpuPath>& current() {
  static std::atomic<CpuPath> path{cpu_paths().back()};
  return path;
}

}  // namespace

const char* name(CpuPath path) {
  constexpr std::array kNames{"reference", "portable", "avx2"};
  return kNames[static_cast<size_t>(path)];
}

std::span<const CpuPath> cpu_paths() {
  static const size_t count = has_avx2() ? kAll.size() : kAll.size() - 1;
  return std::span(kAll).first(count);
}

UseCpuPath::UseCpuPath(CpuPath path) {
  if (path > cpu_paths().back()) {
    fail(ErrorKind::kUnsupported, "quant: this processor has no path {}", name(path));
  }
  current() = path;
}

UseCpuPath::~UseCpuPath() { current() = cpu_paths().back(); }

bool detail::by_reference() { return current() == CpuPath::kReference; }
bool detail::by_avx2() { return current() == CpuPath::kAvx2; }

}  // namespace moiety::quant
