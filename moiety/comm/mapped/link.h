// A rank's end of a group on its GPU: the symmetric memory through which its operations run, and
// what the host knows of them.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "moiety/comm/gpu_link.h"
#include "moiety/comm/mapped/attached.h"
#include "moiety/comm/mapped/kernels.h"

namespace moiety::comm::mapped {

class Link final : public GpuLink {
 public:
  // Collective. Throws what SymmetricBuffer::create throws.
  Link(Communicator& comm, Device gpu, const GpuLinkOptions& options);
  // Waits for the operations that were enqueued, at most as long as a wait may take.
  ~Link() override;
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  Device gpu() const { return gpu_; }
  void attach(const SymmetricBuffer& buffer) override;
  void issue(const CollectiveCall& call, const Stream& stream) override;

  bool failed() const override;
  void end_waits() override;
  void check() override;
  const uint64_t* fault_word() const override {
    return reinterpret_cast<const uint64_t*>(memory_.local() + region_.places.poison);
  }
  const uint64_t* waited_word() const override { return &region_.control->waited_ns; }

 private:
  std::string abort_text() const;
  // Makes the stream wait for the operation before, if that was on another stream.
  void follow(const Stream& stream);
  // Holds the host up while too many operations are under way (Note [Few operations under way]).
  void keep_close(const Stream& stream);
  Meeting meeting_of(const CollectiveCall& call, int64_t place) const;
  void enqueue(const Step& step, const CollectiveCall& call, Meeting& meeting,
               const Stream& stream);
  void enqueue_sum(const SumStep& step, const CollectiveCall& call, const Stream& stream);
  // Makes the stream wait for the sums beside it.
  void join_sums(const Stream& stream);

  Communicator* comm_;
  Device gpu_;
  WaitingBlocks waiting_;
  GpuLinkOptions options_;
  SymmetricBuffer memory_;
  Region region_{};
  std::vector<std::byte*> parts_;  // of memory_, by rank
  AttachedBuffers attached_;
  // A stream of the lowest priority for sums that run beside copies, made for beside_compute.
  Stream sums_;
  Event landed_, summed_;
  bool sums_run_ = false;       // some of the operation that is being enqueued
  Event last_, last_captured_;  // behind the last operation outside of, and in, a capture
  uint64_t capture_ = 0;        // where last_captured_ was recorded
  void* last_stream_ = nullptr;
  bool any_ = false;
  Event marks_[2];       // behind the last operations whose numbers are multiples of kAhead / 2
  uint64_t issued_ = 0;  // operations, but for those in captures
  std::string failure_;
};

// Returns when the event is complete. If a peer aborts, or one of the waits fails, ends all of them
// and throws the error, that of the communicator `name` for an abort.
void wait(const Event& event, std::span<GpuWaits* const> all, const std::string& name,
          Bootstrap& bootstrap);

}  // namespace moiety::comm::mapped
