// The device of a run's ranks, and of evaluation and generation: run.device, applied to this
// machine.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "moiety/base/gpu.h"
#include "moiety/comm/bootstrap.h"

namespace moiety::app {

// What is asked of a device.
struct DeviceWish {
  std::string_view device;  // run.device
  int ranks = 1;
  bool share = false;     // run.share_gpus
  int here = 0;           // ranks of this host; 0: all
  bool apart = false;     // a launcher started them, which may show each a GPU of its own
  std::string no_nccl{};  // why NCCL cannot be used; empty if it can
  std::string refusal{};  // why these ranks cannot compute on GPUs; empty if they can
};

struct DeviceChoice {
  Device device;       // of rank 0
  int gpus = 1;        // on GPUs: those that ranks take in turn
  int of_gpu = 1;      // ranks that share one of them
  std::string note{};  // for the log: the reason why an existing GPU is left alone
};

// Chooses the device. "auto" takes GPUs where each rank of this host gets one of its own (or may
// share), their compute capability `major` is at least 9, and nothing refuses them; else the CPU.
// "cuda" throws DeviceError if GPUs cannot be used or are too few, UsageError if they are refused.
// Ranks that are apart and see one GPU each take it; that it is not the same one they find out
// together (comm::check_own_gpus). A pure function; `major` only counts if there is a GPU.
DeviceChoice choose_device(const DeviceWish& wish, const GpuStatus& gpus, int major);
// A rank's choice by "auto" when it knows, by rank, why others compute on the CPU (empty: they do
// not): if any does, all do.
DeviceChoice common_choice(DeviceChoice mine, std::span<const std::string> reasons);

// Makes the choice on this machine and logs the note. With `bootstrap`, that of ranks that are
// processes, it is collective, whatever each was told: those with "auto" take GPUs if all ranks do.
DeviceChoice rank_devices(const DeviceWish& wish, comm::Bootstrap* bootstrap = nullptr);
// The same for one rank.
Device rank_device(std::string_view wanted);

}  // namespace moiety::app
