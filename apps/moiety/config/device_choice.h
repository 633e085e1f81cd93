// Where the ranks of a run compute, and evaluation and generation: run.device, on this machine.
#pragma once

#include <string>
#include <string_view>

#include "moiety/base/gpu.h"

namespace moiety::app {

struct DeviceChoice {
  Device device;
  std::string note;  // for the log: why a GPU that is there is left alone
};

// "auto" takes the first GPU for a run of one rank, if its compute capability `major` is at least
// 9, else the CPU. "cuda" throws DeviceError if that GPU cannot be used, UsageError for several
// ranks. Pure; `major` is looked at if there is a GPU.
DeviceChoice choose_device(std::string_view wanted, int ranks, const GpuStatus& gpus, int major);

// The choice on this machine; the note is logged. All ranks compute there.
Device rank_device(std::string_view wanted, int ranks);

}  // namespace moiety::app
