// The environment that ranks on GPUs need of the CUDA driver, which reads it when it starts.
//
// Note [Environment of ranks on GPUs]
//
//   CUDA_DEVICE_MAX_CONNECTIONS=32    Streams share queues of the GPU, 8 by default; in one queue a
//                                     waiting kernel holds up the one that it waits for. Fewer than
//                                     32 stand still until the deadline.
//   NCCL_NVLS_ENABLE=0                NVLink multicast is not used, by nobody.
//
// CUDA_MODULE_LOADING is left alone. By CUDA's default a kernel is loaded when it is first launched,
// which may wait for the GPU, on which another rank may wait for that launch. So communicators and
// groups of experts load their kernels when they are made, and whoever launches others for the first
// time lets operations run alone meanwhile (Communicator::run_alone). EAGER loads all kernels of all
// libraries before anything else, for seconds.
#pragma once

#include <string>
#include <vector>

namespace moiety::comm {

// Sets these variables where the caller's environment does not. To be called before anything touches
// CUDA and before other threads start: at the beginning of main.
void prepare_gpu_environment();

// One of them as it is now.
struct GpuVariable {
  std::string name, wanted;
  std::string value;    // empty: it is not set
  bool enough = false;  // the value does; what is not set does not
  std::string why;      // for a value that is not enough
};
std::vector<GpuVariable> gpu_variables();

// For ranks on GPUs: throws Error(kUsage) naming a variable whose value is not enough.
void check_gpu_environment();

}  // namespace moiety::comm
