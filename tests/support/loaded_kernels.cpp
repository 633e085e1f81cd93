// The program is linked with --wrap=__cudaRegisterFunction: what registers kernels at its start comes
// by here.
#include "tests/support/loaded_kernels.h"

#include <cuda.h>
#include <vector>

#include "moiety/base/cuda_check.cuh"

namespace {

struct Kernel {
  const void* host;
  const char* name;
};
// Made by whichever static object comes first.
std::vector<Kernel>& kernels() {
  static auto& all = *new std::vector<Kernel>;
  return all;
}

}  // namespace

extern "C" {

void __real___cudaRegisterFunction(void** module, const char* host, char* name, const char* full,
                                   int threads, void* tid, void* bid, void* block, void* grid,
                                   int* warp);
void __wrap___cudaRegisterFunction(void** module, const char* host, char* name, const char* full,
                                   int threads, void* tid, void* bid, void* block, void* grid,
                                   int* warp) {
  kernels().push_back({host, full});
  __real___cudaRegisterFunction(module, host, name, full, threads, tid, bid, block, grid, warp);
}

}  // extern "C"

namespace moiety::testing {

Kernels find_kernels(int device) {
  const CudaDeviceGuard guard(device);
  constexpr unsigned kVersion = 12040;  // that of CUDA in which the function came
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  MOIETY_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuFuncIsLoaded", &found, kVersion,
                                                     cudaEnableDefault, &result));
  MOIETY_CHECK(result == cudaDriverEntryPointSuccess, "the driver has no cuFuncIsLoaded");
  const auto is_loaded = reinterpret_cast<decltype(&cuFuncIsLoaded)>(found);
  Kernels out;
  for (const Kernel& kernel : kernels()) {
    cudaFunction_t function{};
    MOIETY_CUDA_CHECK(cudaGetFuncBySymbol(&function, kernel.host));
    CUfunctionLoadingState state{};
    MOIETY_CHECK(is_loaded(&state, function) == CUDA_SUCCESS, "cuFuncIsLoaded fails");
    ++out.all;
    if (state == CU_FUNCTION_LOADING_STATE_LOADED) out.loaded.insert(kernel.name);
  }
  return out;
}

}  // namespace moiety::testing
