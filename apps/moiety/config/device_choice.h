// The device of a run's ranks, and of evaluation and generation: run.device, applied to this
// machine.
#pragma once

#include <string>
#include <string_view>

#include "moiety/base/gpu.h"

namespace moiety::app {

struct DeviceChoice {
  Device device;
  std::string note;  // for the log: the reason why an existing GPU is left alone
};

// Chooses a device. "auto" takes the first GPU for a run of one rank, if its compute capability
// `major` is at least 9, else the CPU. "cuda" throws DeviceError if that GPU cannot be used,
// UsageError for several ranks. A pure function; `major` only counts if there is a GPU.
DeviceChoice choose_device(std::string_view wanted, int ranks, const GpuStatus& gpus, int major);

// Makes the choice on this machine and logs the note. All ranks compute on the result.
Device rank_device(std::string_view wanted, int ranks);

}  // namespace moiety::app
