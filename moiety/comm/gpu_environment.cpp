#include "moiety/comm/gpu_environment.h"

#include <cstdlib>

namespace moiety::comm {

void prepare_gpu_environment() {
  constexpr int kKeepOthers = 0;
  ::setenv("CUDA_MODULE_LOADING", "EAGER", kKeepOthers);
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", kKeepOthers);
  ::setenv("NCCL_NVLS_ENABLE", "0", kKeepOthers);
}

}  // namespace moiety::comm
