// The functions of the CUDA driver that the run time has no twin of, found through the run time:
// nothing links libcuda.
#pragma once

#include <cuda.h>

namespace moiety::comm::mapped {

struct DriverCalls {
  decltype(&cuGetErrorString) get_error_string = nullptr;
  decltype(&cuMemGetAllocationGranularity) granularity = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemAddressReserve) reserve = nullptr;
  decltype(&cuMemAddressFree) unreserve = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  decltype(&cuMemExportToShareableHandle) export_handle = nullptr;
  decltype(&cuMemImportFromShareableHandle) import_handle = nullptr;
};
// Throws Error(kUnsupported) if the driver lacks one of them.
const DriverCalls& driver_calls();

// Throws Error(kCuda) that names the call and the error, or Error(kOutOfMemory) if it is that.
void driver_check(CUresult result, const char* call);

}  // namespace moiety::comm::mapped
