#include "moiety/base/error.h"
#include "moiety/base/gpu_runtime.h"
#include "moiety/comm/mapped/driver_calls.cuh"

namespace moiety::comm::mapped {
namespace {

template <class Function>
void find(const char* name, Function& function) {
  void* const found = gpu::driver_function(name);
  if (!found) fail(ErrorKind::kUnsupported, "the CUDA driver has no {}", name);
  function = reinterpret_cast<Function>(found);
}

DriverCalls find_all() {
  DriverCalls out;
  find("cuGetErrorString", out.get_error_string);
  find("cuMemGetAllocationGranularity", out.granularity);
  find("cuMemCreate", out.create);
  find("cuMemRelease", out.release);
  find("cuMemAddressReserve", out.reserve);
  find("cuMemAddressFree", out.unreserve);
  find("cuMemMap", out.map);
  find("cuMemUnmap", out.unmap);
  find("cuMemSetAccess", out.set_access);
  find("cuMemExportToShareableHandle", out.export_handle);
  find("cuMemImportFromShareableHandle", out.import_handle);
  return out;
}

}  // namespace

const DriverCalls& driver_calls() {
  static const DriverCalls calls = find_all();
  return calls;
}

void driver_check(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  const char* words = nullptr;
  driver_calls().get_error_string(result, &words);
  fail(result == CUDA_ERROR_OUT_OF_MEMORY ? ErrorKind::kOutOfMemory : ErrorKind::kCuda, "{}: {}",
       call, words ? words : "an unknown error");
}

}  // namespace moiety::comm::mapped
