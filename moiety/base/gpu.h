// The GPUs of this process: which ones there are, or why there are none.
//
// Only gpu_free_memory creates a context on a GPU. The rest needs none and also answers in a build
// without CUDA, and in a build with CUDA on a machine without a GPU.
#pragma once

#include <cstdint>
#include <string>

#include "moiety/base/device.h"

namespace moiety {

struct GpuStatus {
  bool built = false;  // this build has CUDA code
  int runtime = 0;     // version of the CUDA run time in the build; 13000 is 13.0
  int driver = 0;      // newest CUDA version that the driver supports; 0: no driver
  int count = 0;       // number of usable GPUs
  std::string text;    // the reason if there are none, in the driver's words
};
// The status found at the first call.
const GpuStatus& gpu_status();

struct GpuProperties {
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  int64_t memory = 0;        // bytes
  int64_t l2 = 0;            // bytes of the second-level cache
  int64_t shared_block = 0;  // bytes of shared memory that a block may ask for
};
// The properties of a GPU, looked up once. Throws what `require_device` throws.
const GpuProperties& gpu_properties(int index);
// Bytes of the GPU's memory that are free now. Creates a context on it.
int64_t gpu_free_memory(int index);

// Throws Error(kUnsupported) with the reason unless `device` is a CPU or a GPU that is there. The
// text begins with `what`: "buffer: cuda:0 was asked for, but this build has no CUDA (...)".
void require_device(const char* what, Device device);

// Throws Error(kUnsupported), "quantize: this build has no CUDA (...)"; see cuda_built.h.
[[noreturn]] void fail_without_cuda(const char* operation);

namespace gpu {
// Counts of the things that a step must not do, by the calling thread since it started: allocations
// and releases of GPU or pinned memory, and waits for a stream or an event.
struct Activity {
  int64_t allocations = 0;
  int64_t waits = 0;
};
Activity activity();
}  // namespace gpu

}  // namespace moiety
