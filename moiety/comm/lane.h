// The order of a rank's operations on a communicator, independent of the transport.
//
// Operations of a communicator are carried out in the order of issue, and only while a rank waits:
// a CPU lane is an order, not a thread. A rank that waits for one communicator also carries on the
// operations of its others, so ranks may wait for different ones.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "moiety/comm/collective.h"
#include "moiety/comm/communicator.h"
#include "moiety/comm/gpu_link.h"

namespace moiety::comm {

enum class Progress { kNone, kMoved, kDone };

// A rank's side of one collective operation. `advance` and `waits_for` follow `post`.
class RankOperation {
 public:
  virtual ~RankOperation() = default;
  // Makes the rank take part; from now on its tensors are in use.
  virtual void post(CollectiveCall call) = 0;
  // Takes the rank as far as it can go without waiting. Throws Error(Comm) if the calls of the
  // ranks do not fit each other or a peer gave up.
  virtual Progress advance() = 0;
  // The first peer that this rank waits for; -1 if none.
  virtual int waits_for() const = 0;
  // Gives up for this reason. Returns when nobody touches the rank's tensors any more, and nobody
  // will.
  virtual void give_up(const std::string& reason) = 0;
};

// A rank's end of a group, which makes its operations. A backend is a class of endpoints.
class Endpoint {
 public:
  virtual ~Endpoint() = default;
  virtual const std::string& name() const = 0;
  virtual Bootstrap& bootstrap() = 0;
  virtual bool may_map_memory() const = 0;
  virtual GpuTransport gpu_transport() const = 0;
  // The rank's side of the group's operation `number`, counted from 1; `label` opens its errors.
  virtual std::unique_ptr<RankOperation> operation(uint64_t number, const std::string& label) = 0;
  // A number that every rank proposes for a split; the largest one is passed to `split`.
  virtual uint64_t proposal() const { return 0; }
  // The rank's end of its sub-group in split `number`: the sub-group of this color, with these
  // ranks of the group in this order. Null for a negative color.
  virtual std::shared_ptr<Endpoint> split(uint64_t number, int color, const std::string& name,
                                          const std::vector<int>& ranks,
                                          uint64_t largest_proposal) = 0;
};

class Lane;
// The lanes of one rank, those of its sub-groups included; used by the rank's thread alone. With
// them goes what the rank's communicators share on its GPU.
struct RankLanes : std::vector<Lane*> {
  std::vector<GpuWaits*> waits;
  RankGpu gpu;
  Communicator* alone = nullptr;  // whose ranks meet before each operation (run_alone)
};

// A rank's operations on one communicator that are issued and not yet complete. Tickets keep it
// alive.
class Lane {
 public:
  Lane(std::shared_ptr<Endpoint> endpoint, std::shared_ptr<RankLanes> lanes);
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  Endpoint& endpoint() const { return *endpoint_; }
  const std::shared_ptr<RankLanes>& lanes() const { return lanes_; }

  // Issues an operation and returns its number, from 1. Throws if an earlier operation failed.
  uint64_t issue(CollectiveCall call, const Stream& stream);
  // Returns when operations up to `number` are complete; throws the error that made one fail.
  void wait(uint64_t number);

 private:
  struct Pending {
    CollectiveCall call;
    Event inputs;  // marks the work that the stream had when the operation was issued
    std::string label;
    std::unique_ptr<RankOperation> operation;
    bool posted = false;
  };

  // Takes the operations as far as they go without waiting; true if something moved. A failure is
  // kept for the callers that wait for this lane.
  bool advance();
  Progress advance_front();
  // Makes all waits and issues of this lane throw from now on. Peers stop touching this rank's
  // tensors.
  void fail_with(const std::string& reason);
  std::string late() const;

  std::shared_ptr<Endpoint> endpoint_;
  std::shared_ptr<RankLanes> lanes_;
  std::deque<Pending> pending_;
  uint64_t issued_ = 0;
  uint64_t completed_ = 0;
  std::string failure_;
};

// The communicator over a lane.
class LaneCommunicator final : public Communicator {
 public:
  LaneCommunicator(std::shared_ptr<Endpoint> endpoint, std::shared_ptr<RankLanes> lanes);
  ~LaneCommunicator() override;

  int rank() const override { return lane_->endpoint().bootstrap().rank(); }
  int size() const override { return lane_->endpoint().bootstrap().size(); }
  const std::string& name() const override { return lane_->endpoint().name(); }
  Bootstrap& bootstrap() override { return lane_->endpoint().bootstrap(); }
  bool may_map_memory() const override { return lane_->endpoint().may_map_memory(); }
  GpuTransport gpu_transport() const { return lane_->endpoint().gpu_transport(); }

  Ticket all_reduce(TensorView x, ReduceOp op, Stream stream) override;
  Ticket all_gather(TensorView send, TensorView recv, Stream stream) override;
  Ticket reduce_scatter(TensorView send, TensorView recv, ReduceOp op, Stream stream) override;
  Ticket all_to_all(TensorView send, std::span<const int64_t> send_counts, TensorView recv,
                    std::span<const int64_t> recv_counts, Stream stream) override;
  Ticket broadcast(TensorView x, int root, Stream stream) override;
  void barrier() override;
  void prepare(Device gpu, const GpuLinkOptions& options) override;
  void attach(const SymmetricBuffer& buffer) override;
  void synchronize(const Stream& stream) override;
  void wait(const Event& event) override;
  void run_alone(bool alone) override;
  std::unique_ptr<Communicator> split(int color, int key, const std::string& name) override;

  void meet(const Stream& gpu) { issue_on_gpu({}, gpu).wait(); }
  const std::shared_ptr<RankLanes>& lanes() const { return lane_->lanes(); }
  const GpuLink* link() const { return link_.get(); }  // null before prepare

 private:
  Ticket issue(CollectiveCall call, const Stream& stream);
  Ticket issue_on_gpu(const CollectiveCall& call, const Stream& stream);

  std::shared_ptr<Lane> lane_;
  std::shared_ptr<GpuLink> link_;  // null before the first operation on a GPU, and for one rank
  std::shared_ptr<nccl::Group> group_;  // for the link, where the parent's made it
  uint64_t splits_ = 0;
};

}  // namespace moiety::comm
