#include "moiety/comm/thread/thread_communicator.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include "moiety/base/error.h"

namespace moiety::comm::thread {

Lane::Lane(std::shared_ptr<Group> group, int rank, std::shared_ptr<RankLanes> lanes)
    : group_(std::move(group)), rank_(rank), lanes_(std::move(lanes)) {
  lanes_->push_back(this);
}

Lane::~Lane() { std::erase(*lanes_, this); }

uint64_t Lane::issue(CollectiveCall call, const Stream& stream) {
  if (!failure_.empty()) throw Error(ErrorKind::kComm, failure_);
  Pending& p = pending_.emplace_back();
  p.call = std::move(call);
  p.inputs.record(stream);
  p.operation = group_->operation(++issued_);
  advance();
  return issued_;
}

void Lane::wait(uint64_t number) {
  // Runs what a deferred stream holds back; copies, since that may wait on this lane too.
  std::vector<Event> inputs;
  for (uint64_t n = completed_; n < number; ++n) inputs.push_back(pending_[n - completed_].inputs);
  for (const Event& event : inputs) event.wait();

  Deadline deadline(group_->deadline);
  Backoff backoff;
  while (completed_ < number) {
    if (!failure_.empty()) throw Error(ErrorKind::kComm, failure_);
    // Read before `advance`: a peer that failed in this operation left its reason there first.
    const bool aborted = group_->world->aborted;
    bool moved = false;
    for (size_t i = 0; i < lanes_->size(); ++i) moved |= (*lanes_)[i]->advance();
    if (moved) {
      deadline = Deadline(group_->deadline);
      backoff = Backoff();
    } else if (aborted) {
      // No rank of our own in the text: peers that hear of it from us say the same.
      const Pending& front = pending_.front();
      fail_with(text("{}: {} stopped: {}", front.operation->label(), describe(front.call),
                     ThreadBootstrap(group_, rank_).aborted().value_or("")));
    } else if (backoff.polls() % 256 == 255 && deadline.expired()) {
      const std::string reason = late();
      if (!reason.empty()) fail_with(reason);
      backoff.pause();
    } else {
      backoff.pause();
    }
  }
}

// Empty if the peers arrived just now.
std::string Lane::late() const {
  const Pending& front = pending_.front();
  const int peer = front.posted ? front.operation->waits_for(rank_) : rank_;
  if (peer < 0) return "";
  return text("{}: rank {} waited {:.1f} s in {} for {}", front.operation->label(), rank_,
              group_->deadline.count(), describe(front.call),
              front.posted ? text("rank {}", peer) : "its own stream");
}

bool Lane::advance() {
  bool moved = false;
  try {
    while (failure_.empty() && !pending_.empty()) {
      const Progress progress = advance_front();
      moved |= progress != Progress::kNone;
      if (progress != Progress::kDone) break;
      pending_.pop_front();
      ++completed_;
    }
  } catch (const std::exception& e) {
    fail_with(e.what());
    moved = true;
  }
  return moved;
}

Progress Lane::advance_front() {
  Pending& front = pending_.front();
  if (!front.posted) {
    if (!front.inputs.complete()) return Progress::kNone;
    front.operation->post(rank_, front.call);
    front.posted = true;
  }
  return front.operation->advance(rank_);
}

void Lane::fail_with(const std::string& reason) {
  failure_ = reason;
  if (pending_.front().posted) pending_.front().operation->give_up(reason);
}

namespace {

class LaneTicket final : public Ticket::Operation {
 public:
  LaneTicket(std::shared_ptr<Lane> lane, uint64_t number)
      : lane_(std::move(lane)), number_(number) {}
  void wait() override { lane_->wait(number_); }

 private:
  std::shared_ptr<Lane> lane_;
  uint64_t number_;
};

// What ranks tell each other in a split.
struct Choice {
  int color, key;
};

}  // namespace

ThreadCommunicator::ThreadCommunicator(std::shared_ptr<Group> group, int rank,
                                       std::shared_ptr<RankLanes> lanes)
    : bootstrap_(group, rank),
      lane_(std::make_shared<Lane>(std::move(group), rank, std::move(lanes))) {}

Ticket ThreadCommunicator::issue(CollectiveCall call, const Stream& stream) {
  return Ticket(std::make_shared<LaneTicket>(lane_, lane_->issue(std::move(call), stream)));
}

Ticket ThreadCommunicator::all_reduce(TensorView x, ReduceOp op, Stream stream) {
  return issue(all_reduce_call(x, op), stream);
}

Ticket ThreadCommunicator::all_gather(TensorView send, TensorView recv, Stream stream) {
  return issue(all_gather_call(size(), send, recv), stream);
}

Ticket ThreadCommunicator::reduce_scatter(TensorView send, TensorView recv, ReduceOp op,
                                          Stream stream) {
  return issue(reduce_scatter_call(size(), send, recv, op), stream);
}

Ticket ThreadCommunicator::all_to_all(TensorView send, std::span<const int64_t> send_counts,
                                      TensorView recv, std::span<const int64_t> recv_counts,
                                      Stream stream) {
  return issue(all_to_all_call(size(), send, send_counts, recv, recv_counts), stream);
}

Ticket ThreadCommunicator::broadcast(TensorView x, int root, Stream stream) {
  return issue(broadcast_call(size(), x, root), stream);
}

void ThreadCommunicator::barrier() { issue(CollectiveCall{}, Stream()).wait(); }

std::unique_ptr<Communicator> ThreadCommunicator::split(int color, int key,
                                                        const std::string& name) {
  const Choice mine{color, key};
  const auto all = bootstrap_.all_gather({reinterpret_cast<const char*>(&mine), sizeof(mine)});
  std::vector<std::pair<int, int>> members;  // (key, rank) of this color
  for (int r = 0; r < size(); ++r) {
    Choice theirs;
    std::memcpy(&theirs, all[r].data(), sizeof(theirs));
    if (theirs.color == color) members.emplace_back(theirs.key, r);
  }
  ++splits_;
  if (color < 0) return nullptr;
  std::sort(members.begin(), members.end());
  std::vector<int> ranks;
  for (const auto& [unused, r] : members) ranks.push_back(r);
  const int own = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank()) - ranks.begin());
  return std::make_unique<ThreadCommunicator>(lane_->group()->child(splits_, color, name, ranks),
                                              own, lane_->lanes());
}

}  // namespace moiety::comm::thread
