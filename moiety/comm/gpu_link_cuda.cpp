#include "moiety/base/cuda_check.cuh"
#include "moiety/base/error.h"
#include "moiety/base/log.h"
#include "moiety/comm/gpu_link.h"
#include "moiety/comm/mapped/link.h"
#include "moiety/comm/nccl/link.h"

namespace moiety::comm {
namespace {

std::shared_ptr<GpuLink> make_nccl_link(Communicator& comm, Device gpu,
                                        const GpuLinkOptions& options, RankGpu& rank,
                                        std::shared_ptr<nccl::Group> group,
                                        const std::string& why) {
  nccl::check_possible(comm.bootstrap(), gpu, why, nccl::functions());
  if (!rank.lane) rank.lane = Stream::on(gpu);
  return std::make_shared<nccl::Link>(comm, gpu, options, nccl::functions(), std::move(group),
                                      *rank.lane);
}

}  // namespace

std::string gpu_identity(int device) {
  cudaDeviceProp properties{};
  MOIETY_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  return {properties.uuid.bytes, sizeof(properties.uuid.bytes)};
}

std::shared_ptr<GpuLink> make_gpu_link(Communicator& comm, Device gpu,
                                       const GpuLinkOptions& options, GpuTransport transport,
                                       RankGpu& rank, std::shared_ptr<nccl::Group> group) {
  std::string why = "comm.transport = \"nccl\"";
  if (transport != GpuTransport::kNccl) {
    try {
      return std::make_shared<mapped::Link>(comm, gpu, options);
    } catch (const Error& e) {
      if (e.kind() != ErrorKind::kUnsupported || transport == GpuTransport::kMapped) throw;
      why = e.what();
    }
    if (comm.rank() == 0 && !std::exchange(rank.told, true)) {
      log(LogLevel::kInfo, "communicator \"{}\" works over NCCL: {}", comm.name(), why);
    }
  }
  return make_nccl_link(comm, gpu, options, rank, std::move(group), why);
}

}  // namespace moiety::comm
