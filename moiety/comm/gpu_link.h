// A rank's end of a group on its GPU, whatever carries the operations: memory that ranks map
// (mapped/link.h), or NCCL (nccl/link.h).
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>

#include "moiety/comm/collective.h"
#include "moiety/comm/gpu_transport.h"

namespace moiety::comm {

namespace nccl {
class Group;
}

class GpuLink {
 public:
  virtual ~GpuLink() = default;

  virtual void attach(const SymmetricBuffer& buffer) = 0;
  // Enqueues the call. Throws the error of an earlier operation.
  virtual void issue(const CollectiveCall& call, const Stream& stream) = 0;
  // Whether an operation has failed.
  virtual bool failed() = 0;
  // Ends the waits of operations.
  virtual void end_waits() = 0;
  // Throws the error of an operation that has failed.
  virtual void check() = 0;
  // Throws the error of a peer that has aborted.
  [[noreturn]] virtual void fail_of_abort() const = 0;
  // This rank's part of NCCL's group of the ranks of this color; null where NCCL carries nothing, or
  // for a negative color. Collective.
  virtual std::shared_ptr<nccl::Group> split(int color, int key) {
    static_cast<void>(color), static_cast<void>(key);
    return nullptr;
  }
};

// Returns when the event is complete. If a peer aborts, or an operation of one of the links fails,
// ends the waits of all of them and throws the error.
void wait(const Event& event, std::span<GpuLink* const> links, Bootstrap& bootstrap);

// What the communicators of a rank share on its GPU.
struct RankGpu {
  std::optional<Stream> lane;  // of NCCL's work
  bool told = false;           // whether the log knows why NCCL is used
};

// Makes the link of a communicator of several ranks. Collective. `group` is what a split of the
// parent's link made. Throws what SymmetricBuffer::create throws, or DeviceError if ranks cannot map
// each other's memory and one has no NCCL.
std::shared_ptr<GpuLink> make_gpu_link(Communicator& comm, Device gpu,
                                       const GpuLinkOptions& options, GpuTransport transport,
                                       RankGpu& rank, std::shared_ptr<nccl::Group> group);

// How many operations a link may have under way (Note [Few operations under way]).
//
// Note [Few operations under way]
//
// A queue of the GPU takes some thousand launches. The thread that stands before a full one holds a
// lock of the driver without which no other thread of the process makes an event or a stream; and
// where that thread's rank is the one whose operation the full queue waits for, all stand still. So
// the host waits for the GPU before a queue can fill: at most kOperationsAhead operations of a link
// are under way, which is more than the GPU needs never to wait for the host. A graph is one launch.
inline constexpr uint64_t kOperationsAhead = 64;

}  // namespace moiety::comm
