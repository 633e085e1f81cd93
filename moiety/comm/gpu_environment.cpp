#include "moiety/comm/gpu_environment.h"

#include <cstdlib>
#include <string_view>

#include "moiety/base/error.h"

namespace moiety::comm {
namespace {

constexpr int kConnections = 32;

struct Wanted {
  const char* name;
  const char* value;
  bool (*enough)(std::string_view value);
  const char* why;
};

constexpr Wanted kWanted[] = {
    {"CUDA_DEVICE_MAX_CONNECTIONS", "32",
     [](std::string_view value) { return std::atoi(value.data()) >= kConnections; },
     "ranks on GPUs would wait for each other in the same queues"},
    {"NCCL_NVLS_ENABLE", "0", [](std::string_view value) { return value == "0"; },
     "NVLink multicast is never used here"},
};

}  // namespace

void prepare_gpu_environment() {
  constexpr int kKeepOthers = 0;
  for (const Wanted& w : kWanted) ::setenv(w.name, w.value, kKeepOthers);
}

std::vector<GpuVariable> gpu_variables() {
  std::vector<GpuVariable> out;
  for (const Wanted& w : kWanted) {
    const char* value = std::getenv(w.name);
    out.push_back({w.name, w.value, value ? value : "", value && w.enough(value), w.why});
  }
  return out;
}

void check_gpu_environment() {
  for (const GpuVariable& v : gpu_variables()) {
    if (v.enough) continue;
    throw UsageError("{} is {}: {}: {}", v.name, v.value.empty() ? "not set" : v.value, v.why,
                     v.value.empty() ? text("set it to {}", v.wanted)
                                     : text("unset it, or set it to {}", v.wanted));
  }
}

}  // namespace moiety::comm
