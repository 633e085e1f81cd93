// The program is linked with --wrap=__cudaRegisterFunction: what registers kernels at its start comes
// by here. Who asks for a kernel by its symbol gets it loaded, so one kernel of each file is asked
// for, and the others are found beside it.
#include "tests/support/loaded_kernels.h"

#include <cuda.h>
#include <map>
#include <vector>

#include "moiety/base/cuda_check.cuh"

namespace {

// A kernel of each file, by the file's handle. Made by whichever static object comes first.
std::map<void**, const void*>& kernel_of_file() {
  static auto& all = *new std::map<void**, const void*>;
  return all;
}

}  // namespace

extern "C" {

void __real___cudaRegisterFunction(void** file, const char* host, char* name, const char* full,
                                   int threads, void* tid, void* bid, void* block, void* grid,
                                   int* warp);
void __wrap___cudaRegisterFunction(void** file, const char* host, char* name, const char* full,
                                   int threads, void* tid, void* bid, void* block, void* grid,
                                   int* warp) {
  kernel_of_file().try_emplace(file, host);
  __real___cudaRegisterFunction(file, host, name, full, threads, tid, bid, block, grid, warp);
}

}  // extern "C"

namespace moiety::testing {
namespace {

template <class F>
F driver_call(const char* name) {
  constexpr unsigned kVersion = 12040;  // that of CUDA in which the last of them came
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  MOIETY_CUDA_CHECK(
      cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &result));
  MOIETY_CHECK(result == cudaDriverEntryPointSuccess, "the driver has no {}", name);
  return reinterpret_cast<F>(found);
}

}  // namespace

Kernels find_kernels(int device) {
  const CudaDeviceGuard guard(device);
  const auto module_of = driver_call<decltype(&cuFuncGetModule)>("cuFuncGetModule");
  const auto count = driver_call<decltype(&cuModuleGetFunctionCount)>("cuModuleGetFunctionCount");
  const auto list =
      driver_call<decltype(&cuModuleEnumerateFunctions)>("cuModuleEnumerateFunctions");
  const auto name_of = driver_call<decltype(&cuFuncGetName)>("cuFuncGetName");
  const auto is_loaded = driver_call<decltype(&cuFuncIsLoaded)>("cuFuncIsLoaded");
  const auto check = [](CUresult result) {
    MOIETY_CHECK(result == CUDA_SUCCESS, "a call of the driver returns {}", int(result));
  };
  Kernels out;
  for (const auto& [file, host] : kernel_of_file()) {
    cudaFunction_t known{};
    MOIETY_CUDA_CHECK(cudaGetFuncBySymbol(&known, host));
    CUmodule module{};
    check(module_of(&module, known));
    unsigned n = 0;
    check(count(&n, module));
    std::vector<CUfunction> all(n);
    check(list(all.data(), n, module));
    for (CUfunction function : all) {
      CUfunctionLoadingState state{};
      check(is_loaded(&state, function));
      ++out.all;
      const char* name = "";
      check(name_of(&name, function));
      if (state == CU_FUNCTION_LOADING_STATE_LOADED) out.loaded.insert(name);
    }
  }
  return out;
}

}  // namespace moiety::testing
