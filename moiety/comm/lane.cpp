#include "moiety/comm/lane.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "moiety/base/copy.h"
#include "moiety/base/cuda_built.h"
#include "moiety/base/error.h"
#include "moiety/base/trace.h"
#include "moiety/comm/mapped/link.h"

namespace moiety::comm {

Lane::Lane(std::shared_ptr<Endpoint> endpoint, std::shared_ptr<RankLanes> lanes)
    : endpoint_(std::move(endpoint)), lanes_(std::move(lanes)) {
  lanes_->push_back(this);
}

Lane::~Lane() { std::erase(*lanes_, this); }

uint64_t Lane::issue(CollectiveCall call, const Stream& stream) {
  if (!failure_.empty()) throw_error(ErrorKind::kComm, failure_);
  Pending p;
  p.call = std::move(call);
  p.inputs.record(stream);
  p.label = text("communicator \"{}\", operation {}", endpoint_->name(), issued_ + 1);
  p.operation = endpoint_->operation(issued_ + 1, p.label);
  pending_.push_back(std::move(p));
  ++issued_;
  advance();
  return issued_;
}

void Lane::wait(uint64_t number) {
  // Synchronizing runs the operations that a deferred stream holds back. It works on copies, since
  // such an operation may wait on this lane too.
  std::vector<Event> inputs;
  for (uint64_t n = completed_; n < number; ++n) inputs.push_back(pending_[n - completed_].inputs);
  for (const Event& event : inputs) event.wait();

  Bootstrap& bootstrap = endpoint_->bootstrap();
  Deadline deadline(bootstrap.deadline());
  Backoff backoff;
  while (completed_ < number) {
    if (!failure_.empty()) throw_error(ErrorKind::kComm, failure_);
    // Read before `advance`: a peer that failed in this operation has left its reason there by
    // then.
    const std::optional<std::string> aborted = bootstrap.aborted();
    bool moved = false;
    for (size_t i = 0; i < lanes_->size(); ++i) moved |= (*lanes_)[i]->advance();
    if (moved) {
      deadline = Deadline(bootstrap.deadline());
      backoff = Backoff();
    } else if (aborted) {
      // The text names no rank of its own, so that peers that hear of it from this one say the
      // same.
      const Pending& front = pending_.front();
      fail_with(text("{}: {} stopped: {}", front.label, describe(front.call), *aborted));
    } else {
      backoff.pause();
      if (!backoff.time_to_look() || !deadline.expired()) continue;
      const std::string reason = late();
      if (!reason.empty()) fail_with(reason);
    }
  }
}

// The text of an error of lateness; empty if the peers arrived just now.
std::string Lane::late() const {
  const Pending& front = pending_.front();
  Bootstrap& bootstrap = endpoint_->bootstrap();
  const int peer = front.posted ? front.operation->waits_for() : bootstrap.rank();
  if (peer < 0) return "";
  return text("{}: rank {} waited {:.1f} s in {} for {}", front.label, bootstrap.rank(),
              bootstrap.deadline().count(), describe(front.call),
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
    front.posted = true;
    front.operation->post(front.call);
  }
  return front.operation->advance();
}

void Lane::fail_with(const std::string& reason) {
  failure_ = reason;
  if (pending_.front().posted) pending_.front().operation->give_up(reason);
}

namespace {

class LaneTicket final : public Ticket::Operation {
 public:
  LaneTicket(std::shared_ptr<Lane> lane, uint64_t number, const char* operation, int64_t bytes)
      : lane_(std::move(lane)), number_(number), operation_(operation), bytes_(bytes) {}
  void wait() override {
    const WaitSpan span(TraceLane::kDp, operation_, {{"bytes", bytes_}});
    lane_->wait(number_);
  }

 private:
  std::shared_ptr<Lane> lane_;
  uint64_t number_;
  const char* operation_;
  int64_t bytes_;
};

// A rank's contribution to a split.
struct Choice {
  int color = 0, key = 0;
  uint64_t proposal = 0;
};

}  // namespace

LaneCommunicator::LaneCommunicator(std::shared_ptr<Endpoint> endpoint,
                                   std::shared_ptr<RankLanes> lanes)
    : lane_(std::make_shared<Lane>(std::move(endpoint), std::move(lanes))) {}

LaneCommunicator::~LaneCommunicator() {
  RankLanes& rank = *lanes();
  std::erase(rank.waits, link_.get());
  if (rank.alone == this) rank.alone = nullptr;
}

void LaneCommunicator::prepare(Device gpu, const GpuLinkOptions& options) {
  MOIETY_CHECK(gpu.type == DeviceType::kCuda, "communicator \"{}\": prepare for {}, no GPU", name(),
               moiety::name(gpu));
  require_device("communicator", gpu);
  if (size() == 1 || link_) return;
  if constexpr (kCudaBuilt) {
    link_ = make_gpu_link(*this, gpu, options, gpu_transport(), lanes()->gpu,
                          std::exchange(group_, nullptr));
    lanes()->waits.push_back(link_.get());
  } else {
    fail_without_cuda("communicator");
  }
}

void LaneCommunicator::attach(const SymmetricBuffer& buffer) {
  if (size() == 1) return;
  MOIETY_CHECK(link_, "communicator \"{}\": attach before prepare", name());
  link_->attach(buffer);
}

void LaneCommunicator::synchronize(const Stream& stream) {
  if constexpr (kCudaBuilt) {
    if (link_ && stream.device().type == DeviceType::kCuda) {
      Event end;
      end.record(stream);
      GpuWaits* const own[] = {link_.get()};
      return mapped::wait(end, own, name(), bootstrap());
    }
  }
  stream.synchronize();
}

void LaneCommunicator::wait(const Event& event) {
  if constexpr (kCudaBuilt) {
    if (!lanes()->waits.empty()) return mapped::wait(event, lanes()->waits, name(), bootstrap());
  }
  event.wait();
}

void LaneCommunicator::run_alone(bool alone) {
  lanes()->alone = alone && size() > 1 ? this : nullptr;
}

namespace {

// What the communicator's rank shares among its communicators; null if it is of another kind.
std::shared_ptr<RankLanes> lanes_of(Communicator& comm) {
  const auto* lane = dynamic_cast<const LaneCommunicator*>(&comm);
  return lane ? lane->lanes() : nullptr;
}

}  // namespace

const uint64_t* fault_word(const Communicator& comm) {
  const auto* lane = dynamic_cast<const LaneCommunicator*>(&comm);
  return lane && lane->link() ? lane->link()->fault_word() : nullptr;
}

GpuWatch::GpuWatch(Communicator& comm, GpuWaits& waits) : lanes_(lanes_of(comm)), waits_(&waits) {
  if (lanes_) lanes_->waits.push_back(waits_);
}

GpuWatch::~GpuWatch() {
  if (lanes_) std::erase(lanes_->waits, waits_);
}

void enqueue(Communicator& comm, const Stream& stream, const std::function<void()>& operation) {
  const std::shared_ptr<RankLanes> lanes = lanes_of(comm);
  Communicator* const alone = lanes ? lanes->alone : nullptr;
  if (alone) alone->barrier();
  operation();
  if (!alone) return;
  Event end;
  end.record(stream);
  comm.wait(end);
}

// The collective of one rank only has to bring `send` to `recv`.
Ticket LaneCommunicator::issue_on_gpu(const CollectiveCall& call, const Stream& stream) {
  if (size() > 1) {
    enqueue(*this, stream, [&] {
      prepare(stream.device(), {});
      link_->issue(call, stream);
    });
    return {};
  }
  if (call.send == call.recv) return {};
  const int64_t rows = call.kind == Collective::kAllToAll ? call.send_rows[0] : 1;
  const auto bytes_at = [&](const std::byte* data) {
    return TensorView(const_cast<std::byte*>(data), DType::kUInt8, {rows * call.bytes()},
                      stream.device());
  };
  copy(bytes_at(call.recv), bytes_at(call.send), stream);
  return {};
}

Ticket LaneCommunicator::issue(CollectiveCall call, const Stream& stream) {
  if (stream.device().type == DeviceType::kCuda) return issue_on_gpu(call, stream);
  const char* operation = comm::name(call.kind);
  const int64_t bytes = call.bytes();
  const uint64_t number = lane_->issue(std::move(call), stream);
  return Ticket(std::make_shared<LaneTicket>(lane_, number, operation, bytes));
}

Ticket LaneCommunicator::all_reduce(TensorView x, ReduceOp op, Stream stream) {
  return issue(all_reduce_call(x, op), stream);
}

Ticket LaneCommunicator::all_gather(TensorView send, TensorView recv, Stream stream) {
  return issue(all_gather_call(size(), send, recv), stream);
}

Ticket LaneCommunicator::reduce_scatter(TensorView send, TensorView recv, ReduceOp op,
                                        Stream stream) {
  return issue(reduce_scatter_call(size(), send, recv, op), stream);
}

Ticket LaneCommunicator::all_to_all(TensorView send, std::span<const int64_t> send_counts,
                                    TensorView recv, std::span<const int64_t> recv_counts,
                                    Stream stream) {
  return issue(all_to_all_call(size(), send, send_counts, recv, recv_counts), stream);
}

Ticket LaneCommunicator::broadcast(TensorView x, int root, Stream stream) {
  return issue(broadcast_call(size(), x, root), stream);
}

void LaneCommunicator::barrier() { issue(CollectiveCall{}, Stream()).wait(); }

std::unique_ptr<Communicator> LaneCommunicator::split(int color, int key, const std::string& name) {
  Endpoint& endpoint = lane_->endpoint();
  const Choice mine{color, key, endpoint.proposal()};
  const auto all =
      endpoint.bootstrap().all_gather({reinterpret_cast<const char*>(&mine), sizeof(mine)});
  std::vector<std::pair<int, int>> members;  // (key, rank) of this color
  uint64_t largest = 0;
  for (int r = 0; r < size(); ++r) {
    Choice theirs;
    std::memcpy(&theirs, all[r].data(), sizeof(theirs));
    if (theirs.color == color) members.emplace_back(theirs.key, r);
    largest = std::max(largest, theirs.proposal);
  }
  std::sort(members.begin(), members.end());
  std::vector<int> ranks;
  for (const auto& [unused, r] : members) ranks.push_back(r);
  const auto group = endpoint.split(++splits_, color, name, ranks, largest);
  // Groups of one rank need none.
  const auto part = link_ ? link_->split(ranks.size() > 1 ? color : -1, key) : nullptr;
  if (!group) return nullptr;
  auto out = std::make_unique<LaneCommunicator>(group, lanes());
  out->group_ = part;
  return out;
}

}  // namespace moiety::comm
