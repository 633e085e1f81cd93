#include "moiety/comm/gpu_transport.h"

#include "moiety/base/integer.h"
#include "moiety/comm/nccl/functions.h"

namespace moiety::comm {

NcclStatus nccl_status() {
  const nccl::Functions& f = nccl::functions();
  return {f.available, f.text};
}

int64_t nccl_link_bytes(int ranks, const GpuLinkOptions& options) {
  if (ranks == 1) return 0;
  constexpr int64_t kOfNccl = int64_t{64} << 20;
  return round_up(options.staging_bytes, kGpuMemoryUnit) + kGpuMemoryUnit + kOfNccl;
}

}  // namespace moiety::comm
