#include "apps/moiety/config/device_choice.h"

#include "apps/moiety/exit_code.h"
#include "moiety/base/log.h"

namespace moiety::app {
namespace {

constexpr int kLeastMajor = 9;  // Hopper

}  // namespace

DeviceChoice choose_device(std::string_view wanted, int ranks, const GpuStatus& gpus, int major) {
  const Device gpu{DeviceType::kCuda, 0};
  if (wanted == "cpu") return {};
  const bool demanded = wanted == "cuda";
  if (gpus.count == 0) {
    if (demanded) throw DeviceError("run.device = \"cuda\": {}", gpus.text);
    return {};
  }
  if (major < kLeastMajor) {
    const std::string old = text("{} is of compute capability {}.x, but at least {}.0 is needed",
                                 name(gpu), major, kLeastMajor);
    if (demanded) throw DeviceError("run.device = \"cuda\": {}", old);
    return {{}, old + ": computing on the CPU"};
  }
  if (ranks == 1) return {gpu, {}};
  if (demanded) {
    throw UsageError(
        "run.device = \"cuda\" and run.ranks = {}: this version of Moiety trains on one GPU, with "
        "one rank",
        ranks);
  }
  return {{},
          text("{} ranks on the CPU: this version of Moiety trains on one GPU, with one rank "
               "(run.ranks = 1)",
               ranks)};
}

Device rank_device(std::string_view wanted, int ranks) {
  const GpuStatus& gpus = gpu_status();
  const DeviceChoice choice =
      choose_device(wanted, ranks, gpus, gpus.count > 0 ? gpu_properties(0).major : 0);
  if (!choice.note.empty()) log(LogLevel::kInfo, "{}", choice.note);
  return choice.device;
}

}  // namespace moiety::app
