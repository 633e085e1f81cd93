#include "moiety/base/cuda_check.cuh"
#include "moiety/base/gpu_runtime.h"
#include "moiety/base/log.h"
#include "moiety/comm/mapped/driver_calls.cuh"
#include "moiety/comm/mapped/mapped_range.h"

namespace moiety::comm::mapped {
namespace {

CUmemAllocationProp properties_of(int device) {
  CUmemAllocationProp out{};
  out.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  out.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  out.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  out.location.id = device;
  return out;
}

CUmemAccessDesc access_of(int device) {
  CUmemAccessDesc out{};
  out.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  out.location.id = device;
  out.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return out;
}

CUdeviceptr address(const std::byte* p) { return reinterpret_cast<CUdeviceptr>(p); }

// The driver's functions need the GPU's context, which the run time makes.
void start_device(int device) {
  const CudaDeviceGuard guard(device);
  MOIETY_CUDA_CHECK(cudaFree(nullptr));
}

}  // namespace

int64_t part_granularity(int device) {
  start_device(device);
  const CUmemAllocationProp properties = properties_of(device);
  size_t out = 0;
  driver_check(driver_calls().granularity(&out, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
               "cuMemGetAllocationGranularity");
  return static_cast<int64_t>(out);
}

MappedRange::MappedRange(int parts, int64_t stride) : stride_(stride), parts_(parts) {
  CUdeviceptr base = 0;
  driver_check(driver_calls().reserve(&base, size_t(parts) * size_t(stride), 0, 0, 0),
               "cuMemAddressReserve");
  base_ = reinterpret_cast<std::byte*>(base);
}

MappedRange::~MappedRange() {
  int ignored = 0;
  if (cudaGetDevice(&ignored) == cudaErrorCudartUnloading) return;
  const DriverCalls& driver = driver_calls();
  const auto check = [](CUresult result, const char* call) {
    if (result != CUDA_SUCCESS) {
      log(LogLevel::kError, "{}: error {}", call, static_cast<int>(result));
    }
  };
  for (size_t i = 0; i < parts_.size(); ++i) {
    const Part& part = parts_[i];
    if (part.mapped) {
      check(driver.unmap(address(base_ + int64_t(i) * stride_), size_t(stride_)), "cuMemUnmap");
    }
    if (part.allocated) check(driver.release(part.handle), "cuMemRelease");
  }
  check(driver.unreserve(address(base_), parts_.size() * size_t(stride_)), "cuMemAddressFree");
}

void MappedRange::allocate(int i, int device) {
  start_device(device);
  Part& mine = parts_[i];
  const CUmemAllocationProp properties = properties_of(device);
  CUmemGenericAllocationHandle handle{};
  const CUresult result = driver_calls().create(&handle, size_t(stride_), &properties, 0);
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    fail(ErrorKind::kOutOfMemory, "out of memory ({} are free)",
         bytes_text(moiety::gpu::free_memory(device)));
  }
  driver_check(result, "cuMemCreate");
  mine.handle = handle;
  mine.device = device;
  mine.allocated = true;
  driver_check(driver_calls().map(address(part(i)), size_t(stride_), 0, handle, 0), "cuMemMap");
  mine.mapped = true;
}

int MappedRange::descriptor_of(int i) const {
  int out = -1;
  driver_check(driver_calls().export_handle(&out, parts_[i].handle,
                                            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
               "cuMemExportToShareableHandle");
  return out;
}

void MappedRange::take(int i, int descriptor, int device) {
  Part& theirs = parts_[i];
  CUmemGenericAllocationHandle handle{};
  driver_check(driver_calls().import_handle(&handle, reinterpret_cast<void*>(intptr_t{descriptor}),
                                            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
               "cuMemImportFromShareableHandle");
  theirs.handle = handle;
  theirs.device = device;
  theirs.allocated = true;
  driver_check(driver_calls().map(address(part(i)), size_t(stride_), 0, handle, 0), "cuMemMap");
  theirs.mapped = true;
  const CUmemAccessDesc access = access_of(device);
  driver_check(driver_calls().set_access(address(part(i)), size_t(stride_), &access, 1),
               "cuMemSetAccess");
}

void MappedRange::open(int i, std::span<const int> devices) {
  const int own = parts_[i].device;
  std::vector<CUmemAccessDesc> access;
  for (const int device : devices) {
    int reaches = device == own;
    if (!reaches) MOIETY_CUDA_CHECK(cudaDeviceCanAccessPeer(&reaches, device, own));
    if (!reaches) {
      fail(ErrorKind::kUnsupported, "no peer access between cuda:{} and cuda:{}", device, own);
    }
    access.push_back(access_of(device));
  }
  driver_check(
      driver_calls().set_access(address(part(i)), size_t(stride_), access.data(), access.size()),
      "cuMemSetAccess");
  const CudaDeviceGuard guard(own);
  MOIETY_CUDA_CHECK(cudaMemsetAsync(part(i), 0, size_t(stride_), cudaStreamPerThread));
  MOIETY_CUDA_CHECK(cudaStreamSynchronize(cudaStreamPerThread));
}

}  // namespace moiety::comm::mapped
