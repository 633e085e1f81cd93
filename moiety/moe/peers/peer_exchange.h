// The exchange of a group of several ranks on GPUs (docs/adr/0035-expert-parallelism-on-gpus.md):
// its memory, and its operations as steps of kernels on the caller's stream, which may be captured.
// Nothing in an operation waits for the host.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "moiety/comm/gpu_waits.h"
#include "moiety/moe/exchange_mapped.h"
#include "moiety/moe/findings.h"
#include "moiety/moe/row_movers.h"

namespace moiety::moe::peers {

class PeerExchange : public comm::GpuWaits {
 public:
  bool failed() const override { return !failure().empty(); }
  void check() override;

  // As in Exchange: collective, between operations. `wait` returns when the operations issued so
  // far have ended; a peer's abort ends their waits.
  virtual void allocate(const EpLimits& limits) = 0;
  virtual void release() = 0;
  virtual const EpBytes& bytes() const = 0;
  virtual void wait(const Stream& stream) = 0;
  // Whether the stream is captured into a graph.
  virtual bool captured(const Stream& stream) const = 0;
  // The reason why the group is poisoned; empty if none is known.
  virtual std::string failure() const = 0;
  // The nanoseconds that operations have waited for peers, in memory of the device. Those between
  // `set_apart` and `join`, which is called on the stream of what runs beside them, do not count
  // before that stream is there.
  virtual int64_t* waited_ns() const = 0;
  virtual void set_apart(const Stream& stream) = 0;
  virtual void join(const Stream& beside) = 0;
  // Between operations: buffers of all ranks that peers may reach. False if it is not attached.
  virtual void attach(const comm::SymmetricBuffer& buffer) = 0;
  virtual bool detach(const comm::SymmetricBuffer& buffer) = 0;
  // Whether an attached buffer holds these rows.
  virtual bool reaches(const Operand& operand) const = 0;
  virtual std::optional<Finding> take_finding(Epoch epoch) = 0;
  virtual void take_report(const TensorView& report, const Stream& stream) = 0;

  // Nanoseconds of the rows of the operation that moved rows last, from the first store to the last
  // chunk's arrival; the stream must have ended it.
  virtual uint64_t last_rows_ns() const = 0;

  // Operations, whose arguments have been checked. `epoch` is that of the plan.
  virtual void prepare(const EpPlan& plan, const PrepareArgs& args, Epoch epoch,
                       const Stream& stream) = 0;
  virtual void copy_rows(const EpPlan& plan, const DispatchRows& rows, const Stream& stream) = 0;
  // Whether the two have an operation of their own; the same on all ranks.
  virtual bool takes_early() const = 0;
  virtual void prepare_copy_rows(const EpPlan& plan, const PrepareArgs& args, Epoch epoch,
                                 const DispatchRows& rows, const Stream& stream) = 0;
  virtual void scale_rows(const EpPlan& plan, const ScaledRows& rows, const Signature& signature,
                          const Stream& stream) = 0;
  virtual void sum_rows(const EpPlan& plan, const SumArgs& sum, const Signature& signature,
                        const Stream& stream) = 0;

  // For tests, which look into the memory.
  virtual const MappedLayout& layout() const = 0;
  virtual const comm::SymmetricBuffer& memory() const = 0;
};

// The places in a rank's memory of what lies behind the layout where collectives carry rows: words
// that nobody reads, the boxes for peers, and the ranks' entries.
struct CarryPlaces {
  int64_t nowhere = 0, boxes = 0, greetings = 0, end = 0;
};
// The layout of a rank's memory there: as in MappedLayout, of one epoch, with room for the pairs of
// all rows if they are summed in the order of choices.
MappedLayout carried_layout(const ExpertMap& map, const EpLimits& limits, const EpOptions& options);
CarryPlaces carry_places(const ExpertMap& map, const EpLimits& limits, const EpOptions& options);
// The bytes of a group's memory on a GPU.
EpBytes peer_bytes(const ExpertMap& map, const EpLimits& limits, const EpOptions& options);
// The exchange on options.device. Collective. Throws what SymmetricBuffer::create throws.
std::unique_ptr<PeerExchange> make_peer_exchange(comm::Communicator& comm, const ExpertMap& map,
                                                 const EpOptions& options);

}  // namespace moiety::moe::peers
