// A rank's end of a group whose operations NCCL carries: bytes travel through it, sums are Moiety's.
//
// All NCCL work of a rank, of all its groups, runs on one stream, in program order: operations fork
// from the caller's stream, and join it again at their end. NCCL waits for a peer for ever, so it is
// the host that watches: whoever waits for the GPU (comm/gpu_link.h) looks at the time that an
// operation has been open (marks.h) and at NCCL's errors, and ends the group's operations.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "moiety/base/buffer.h"
#include "moiety/comm/gpu_link.h"
#include "moiety/comm/nccl/group.h"
#include "moiety/comm/nccl/marks.h"
#include "moiety/comm/nccl/plan.h"

namespace moiety::comm::nccl {

// Throws UsageError naming two ranks that share a GPU, which NCCL refuses, or Error(kCuda) if a rank
// has no NCCL; `why` opens the text. Collective.
void check_possible(Bootstrap& bootstrap, Device gpu, const std::string& why,
                    const Functions& functions);

class Link final : public GpuLink {
 public:
  // Makes the group, unless `group` is there, and runs one operation of each kind. `lane` is the
  // stream of the rank's NCCL work. Collective. The device may be a CPU, for tests, with a table
  // whose functions have finished when they return.
  Link(Communicator& comm, Device device, const GpuLinkOptions& options, const Functions& functions,
       std::shared_ptr<Group> group, const Stream& lane);
  // Waits for the operations that were enqueued, at most as long as an operation may take.
  ~Link() override;
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  void attach(const SymmetricBuffer& buffer) override;
  void issue(const CollectiveCall& call, const Stream& stream) override;
  bool failed() const override;
  void end_waits() override;
  void check() override;
  bool maps_memory() const override { return false; }
  std::shared_ptr<Group> split(int color, int key) override;

 private:
  // What operations use; it is kept for ever if some cannot be ended.
  struct Memory {
    Buffer gpu, page;
  };

  bool on_gpu() const { return device_.type == DeviceType::kCuda; }
  void* raw_lane() const { return on_gpu() ? lane_.cuda_stream() : nullptr; }
  std::string label() const;
  void warm_up();
  void open(const CollectiveCall& call);
  void exchange_posts();
  void close();
  void enqueue(const Step& step, const CollectiveCall& call);
  void keep_close(const Stream& stream, int64_t launches);
  // The sentence for the operation that is open.
  std::string fault(FaultKind kind, Seconds waited) const;
  void await_reason() const;
  // Keeps the reason for the failure and ends all operations.
  void fail_with(const std::string& text) const;

  Communicator* comm_;
  Device device_;
  Stream lane_;
  std::shared_ptr<Group> group_;
  std::shared_ptr<Memory> memory_;
  PlanInput input_;
  Desk desk_{};
  Event before_, after_;  // an operation's fork and join
  Event last_;            // behind the last operation outside of a capture
  Event marks_[2];        // behind earlier ones
  int64_t launches_ = 0, marked_ = 0;
  // What the host has found when it looked.
  mutable std::string failure_;
  mutable uint64_t seen_ = 0;  // the operation that was open
  mutable Deadline open_since_{Seconds(0)};
  mutable std::optional<Deadline> error_since_;
};

}  // namespace moiety::comm::nccl
