// A rank's end of a group on its GPU, whatever carries the operations: memory that ranks map
// (mapped/link.h), or NCCL (nccl/link.h).
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "moiety/comm/collective.h"
#include "moiety/comm/gpu_transport.h"
#include "moiety/comm/gpu_waits.h"

namespace moiety::comm {

namespace nccl {
class Group;
}

class GpuLink : public GpuWaits {
 public:
  virtual void attach(const SymmetricBuffer& buffer) = 0;
  // Enqueues the call. Throws the error of an earlier operation.
  virtual void issue(const CollectiveCall& call, const Stream& stream) = 0;
  // Whether it works through memory that the ranks map.
  virtual bool maps_memory() const { return true; }
  // This rank's part of NCCL's group of the ranks of this color; null where NCCL carries nothing, or
  // for a negative color. Collective.
  virtual std::shared_ptr<nccl::Group> split(int color, int key) {
    static_cast<void>(color), static_cast<void>(key);
    return nullptr;
  }
};

// What the communicators of a rank share on its GPU.
struct RankGpu {
  std::optional<Stream> lane;  // of NCCL's work
  bool told = false;           // whether the log knows why NCCL is used
  std::vector<void*> waiting;  // streams on which operations have waited for peers
};

// Two ranks that compute on one GPU, which nvidia-smi calls `gpu`.
struct SharedGpu {
  int first = 0, second = 0;
  std::string gpu;
};
// The first such ranks, if there are any. Collective.
std::optional<SharedGpu> find_shared_gpu(Bootstrap& bootstrap, Device gpu);
// The 16 bytes that tell a GPU of any host from all others.
std::string gpu_identity(int device);

// Makes the link of a communicator of several ranks. Collective. `group` is what a split of the
// parent's link made. Throws what SymmetricBuffer::create throws, or DeviceError if ranks cannot map
// each other's memory and one has no NCCL.
std::shared_ptr<GpuLink> make_gpu_link(Communicator& comm, Device gpu,
                                       const GpuLinkOptions& options, GpuTransport transport,
                                       RankGpu& rank, std::shared_ptr<nccl::Group> group);

}  // namespace moiety::comm
