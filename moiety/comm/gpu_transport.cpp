#include "moiety/comm/gpu_transport.h"

#include <cstring>

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
