#include "moiety/comm/gpu_transport.h"

#include <cstring>

#include "moiety/base/cuda_built.h"
#include "moiety/base/error.h"
#include "moiety/base/integer.h"
#include "moiety/comm/lane.h"
#include "moiety/comm/nccl/functions.h"
#include "moiety/comm/process.h"

namespace moiety::comm {

NcclStatus nccl_status() {
  const nccl::Functions& f = nccl::functions();
  return {f.available, f.text};
}

int64_t nccl_link_bytes(int ranks, bool first, const GpuLinkOptions& options) {
  constexpr int64_t kMiB = 1 << 20;
  if (ranks == 1) return 0;
  return round_up(options.staging_bytes, kGpuMemoryUnit) + kGpuMemoryUnit +
         (first ? 868 : 132) * kMiB;
}

bool maps_gpu_memory(const Communicator& comm) {
  const auto* lane = dynamic_cast<const LaneCommunicator*>(&comm);
  return !lane || !lane->link() || lane->link()->maps_memory();
}

namespace {

// "GPU-5f2c7d3e-..." as nvidia-smi has it.
std::string gpu_name(const std::string& identity) {
  std::string out = "GPU-";
  for (size_t i = 0; i < identity.size(); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) out += '-';
    out += text("{:02x}", static_cast<unsigned char>(identity[i]));
  }
  return out;
}

}  // namespace

std::optional<SharedGpu> find_shared_gpu(Bootstrap& bootstrap, Device gpu) {
  if (gpu.type == DeviceType::kCpu) return std::nullopt;
  if constexpr (kCudaBuilt) {
    const std::vector<std::string> all = bootstrap.all_gather(gpu_identity(gpu.index));
    for (int b = 1; b < std::ssize(all); ++b) {
      for (int a = 0; a < b; ++a) {
        if (all[a] == all[b]) return SharedGpu{a, b, gpu_name(all[a])};
      }
    }
  }
  static_cast<void>(bootstrap);
  return std::nullopt;
}

void check_own_gpus(Bootstrap& bootstrap, Device gpu) {
  const std::optional<SharedGpu> shared = find_shared_gpu(bootstrap, gpu);
  if (!shared) return;
  throw DeviceError(
      "ranks {} and {} would share {} ({}): check CUDA_VISIBLE_DEVICES, or --run.share_gpus=true",
      shared->first, shared->second, shared->gpu, name(gpu));
}

int rank_on_host(Bootstrap& bootstrap) {
  const ProcessIdentity mine = this_process();
  int out = 0;
  const std::vector<std::string> all =
      bootstrap.all_gather({reinterpret_cast<const char*>(&mine), sizeof(mine)});
  for (int r = 0; r < bootstrap.rank(); ++r) {
    ProcessIdentity other;
    MOIETY_CHECK(all[r].size() == sizeof(other), "rank_on_host: rank {} sent {} bytes", r,
                 all[r].size());
    std::memcpy(&other, all[r].data(), sizeof(other));
    out += same_host(mine, other);
  }
  return out;
}

}  // namespace moiety::comm
