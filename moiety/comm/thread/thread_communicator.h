// The communicator of ranks that are threads of one process.
//
// Operations of a communicator are carried out in the order of issue, and only while a rank waits:
// a CPU lane is an order, not a thread. A rank that waits for one communicator carries on the
// operations of its others too, so ranks may wait for different ones.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "moiety/comm/communicator.h"
#include "moiety/comm/thread/group.h"
#include "moiety/comm/thread/shared_operation.h"

namespace moiety::comm::thread {

class Lane;
// The lanes of one rank, those of its sub-groups included; used by the rank's thread alone.
using RankLanes = std::vector<Lane*>;

// A rank's operations on one communicator: issued, not yet complete. Tickets keep it alive.
class Lane {
 public:
  Lane(std::shared_ptr<Group> group, int rank, std::shared_ptr<RankLanes> lanes);
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  const std::shared_ptr<Group>& group() const { return group_; }
  const std::shared_ptr<RankLanes>& lanes() const { return lanes_; }
  int rank() const { return rank_; }

  // Returns the operation's number, from 1. Throws if an earlier operation failed.
  uint64_t issue(CollectiveCall call, const Stream& stream);
  // Returns when operations up to `number` are complete; throws what made one fail.
  void wait(uint64_t number);

 private:
  struct Pending {
    CollectiveCall call;
    Event inputs;  // what the stream ran before the issue
    std::shared_ptr<SharedOperation> operation;
    bool posted = false;
  };

  // Takes the operations as far as they go without waiting; true if something moved. A failure is
  // kept for those who wait for this lane.
  bool advance();
  Progress advance_front();
  // After it all waits and issues of this lane throw. Peers stop touching this rank's tensors.
  void fail_with(const std::string& reason);
  std::string late() const;

  std::shared_ptr<Group> group_;
  int rank_;
  std::shared_ptr<RankLanes> lanes_;
  std::deque<Pending> pending_;
  uint64_t issued_ = 0;
  uint64_t completed_ = 0;
  std::string failure_;
};

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<Group> group, int rank, std::shared_ptr<RankLanes> lanes);

  int rank() const override { return bootstrap_.rank(); }
  int size() const override { return bootstrap_.size(); }
  const std::string& name() const override { return lane_->group()->name; }
  Bootstrap& bootstrap() override { return bootstrap_; }

  Ticket all_reduce(TensorView x, ReduceOp op, Stream stream) override;
  Ticket all_gather(TensorView send, TensorView recv, Stream stream) override;
  Ticket reduce_scatter(TensorView send, TensorView recv, ReduceOp op, Stream stream) override;
  Ticket all_to_all(TensorView send, std::span<const int64_t> send_counts, TensorView recv,
                    std::span<const int64_t> recv_counts, Stream stream) override;
  Ticket broadcast(TensorView x, int root, Stream stream) override;
  void barrier() override;
  std::unique_ptr<Communicator> split(int color, int key, const std::string& name) override;

 private:
  Ticket issue(CollectiveCall call, const Stream& stream);

  ThreadBootstrap bootstrap_;
  std::shared_ptr<Lane> lane_;
  uint64_t splits_ = 0;
};

}  // namespace moiety::comm::thread
