#include "moiety/comm/gpu_environment.h"

#include <cstdlib>
#include <string_view>

#include "moiety/base/error.h"
#include "moiety/base/log.h"

namespace moiety::comm {
namespace {

constexpr int kConnections = 32;

struct Wanted {
  const char* name;
  const char* value;
  bool (*enough)(std::string_view value);
  bool needed;
  const char* why;
};

constexpr Wanted kWanted[] = {
    {"CUDA_MODULE_LOADING", "EAGER", [](std::string_view value) { return value == "EAGER"; }, false,
     "a kernel that is loaded late can hold up ranks that wait for each other"},
    {"CUDA_DEVICE_MAX_CONNECTIONS", "32",
     [](std::string_view value) { return std::atoi(value.data()) >= kConnections; }, true,
     "ranks on GPUs would wait for each other in the same queues"},
    {"NCCL_NVLS_ENABLE", "0", [](std::string_view value) { return value == "0"; }, true,
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
    out.push_back({w.name, w.value, value ? value : "", value && w.enough(value), w.needed, w.why});
  }
  return out;
}

void check_gpu_environment() {
  for (const GpuVariable& v : gpu_variables()) {
    if (v.enough) continue;
    const std::string what =
        text("{} is {}: {}: {}", v.name, v.value.empty() ? "not set" : v.value, v.why,
             v.value.empty() ? text("set it to {}", v.wanted)
                             : text("unset it, or set it to {}", v.wanted));
    if (v.needed) throw UsageError(what);
    log(LogLevel::kWarning, "{}", what);
  }
}

}  // namespace moiety::comm
