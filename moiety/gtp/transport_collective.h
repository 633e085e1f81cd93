// The transport of ranks that do not map each other's memory, by collectives of a communicator.
#pragma once

#include <functional>
#include <memory>

#include "moiety/gtp/transport.h"

namespace moiety::gtp {

class CollectiveTransport final : public Transport {
 public:
  // `kind` is kAllToAll or kRing.
  CollectiveTransport(comm::Communicator& comm, TransportOptions options, TransportKind kind)
      : Transport(comm, std::move(options)), kind_(kind) {}

  TransportKind kind() const override { return kind_; }
  bool gathers_alone() const override { return false; }
  SlotArena::Block allocate(const std::string& what, int64_t bytes) override;
  void gather(const GatherJob& job, const Stream& lane) override;
  BundleSpec::Transfer reduce_transfer(const ReduceShape& shape) const override;
  void reduce(const ReduceJob& job, const Stream& lane) override;

  // A collective returns when its inputs are free and all ranks have entered it, so there is
  // nothing left to say.
  void await_readers(bool, const Stream&) override {}
  void publish(int32_t, const Stream&) override {}
  void drain(const Stream&) override {}
  void await_drained(const Stream&) override {}

 private:
  using Tickets = std::vector<comm::Ticket>;
  struct Pending;
  // Runs an operation on the lane: issues collectives now, all before one is waited for, and
  // completes them; then, if all ranks have the same subject, does `then`.
  void run(const char* operation, const Subject& subject, const Stream& lane,
           const std::function<void(Tickets&)>& issue, std::function<void()> then);
  bool scatters(const ReduceShape& shape) const;

  TransportKind kind_;
  uint64_t operations_ = 0;
};

}  // namespace moiety::gtp
