#include "moiety/comm/mpi/mpi_operation.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "moiety/base/error.h"
#include "moiety/base/integer.h"
#include "moiety/comm/reduce.h"

namespace moiety::comm::mpi {
namespace {

// Bytes for data that arrive to be summed. Segments are long, since ranks that share cores pay for
// every round with a turn of the scheduler.
constexpr int64_t kStagingBytes = 32 << 20;

}  // namespace

MpiOperation::MpiOperation(std::shared_ptr<const Group> group, std::shared_ptr<Buffer> staging,
                           std::string label)
    : group_(std::move(group)),
      staging_(std::move(staging)),
      label_(std::move(label)),
      tag_(group_->world->tag(group_->number, kDataKind)),
      transfers_(*group_->world) {}

// Visits peers in an order that spreads the load: every rank begins with another one.
template <class Exchange>
void MpiOperation::with_peers(Exchange&& exchange) {
  for (int i = 1; i < group_->size(); ++i) {
    const int r = (group_->rank + i) % group_->size();
    exchange(r, group_->world_ranks[r]);
  }
}

void MpiOperation::post(CollectiveCall call) {
  call_ = std::move(call);
  calls_.resize(group_->size() * kCallBytes);
  const Wire mine{static_cast<int32_t>(call_.kind), static_cast<int32_t>(call_.dtype),
                  static_cast<int32_t>(call_.op), call_.root, call_.elements};
  std::byte* message = calls_.data() + group_->rank * kCallBytes;
  std::memcpy(message, &mine, sizeof(mine));
  const int64_t bytes = sizeof(Wire) + fill_carried();
  const int tag = group_->world->tag(group_->number, kCallKind);
  with_peers([&](int r, int peer) {
    transfers_.send(peer, tag, message, bytes);
    transfers_.receive(peer, tag, calls_.data() + r * kCallBytes, sizeof(Wire) + room());
  });
}

int64_t MpiOperation::room() const {
  return group_->world->options.largest_message >= kCallBytes ? kCarriedBytes : 0;
}

// Fills the part of the call that carries data; returns its bytes.
int64_t MpiOperation::fill_carried() {
  std::byte* to = carried(group_->rank);
  if (call_.kind == Collective::kAllToAll) {
    const int ranks = group_->size();
    rows_.resize(2 * ranks * ranks);
    int64_t* mine = &rows_[2 * ranks * group_->rank];
    std::copy(call_.send_rows.begin(), call_.send_rows.end(), mine);
    std::copy(call_.recv_rows.begin(), call_.recv_rows.end(), mine + ranks);
    if (!carries_rows()) return 0;
    std::memcpy(to, mine, row_bytes());
    return row_bytes();
  }
  const int64_t bytes = carried_bytes();
  if (bytes > 0) std::memcpy(to, call_.send, bytes);
  return bytes;
}

MpiOperation::Wire MpiOperation::wire(int rank) const {
  Wire out;
  std::memcpy(&out, calls_.data() + rank * kCallBytes, sizeof(out));
  return out;
}

std::byte* MpiOperation::carried(int rank) {
  return calls_.data() + rank * kCallBytes + sizeof(Wire);
}

int64_t MpiOperation::carried_bytes() const {
  int64_t bytes = 0;
  switch (call_.kind) {
    case Collective::kAllReduce:
    case Collective::kAllGather:
    case Collective::kBroadcast:
      bytes = call_.bytes();
      break;
    case Collective::kReduceScatter:
      bytes = group_->size() * call_.bytes();
      break;
    default:
      break;
  }
  return bytes <= room() ? bytes : 0;
}

Progress MpiOperation::advance() {
  Progress progress = Progress::kNone;
  while (transfers_.done()) {
    progress = Progress::kMoved;
    switch (stage_) {
      case Stage::kCalls:
        check_calls();
        if (carried_bytes() > 0) {
          take_carried();
          return Progress::kDone;
        }
        stage_ = Stage::kData;
        if (call_.kind == Collective::kAllToAll) {
          exchange_rows();
          stage_ = Stage::kRows;
        }
        break;
      case Stage::kRows:
        check_rows();
        stage_ = Stage::kData;
        break;
      case Stage::kData:
        if (!next_round()) return Progress::kDone;
        break;
    }
  }
  return progress;
}

int MpiOperation::waits_for() const {
  const std::vector<int> peers = transfers_.peers();
  int out = -1;
  for (const int peer : peers) {
    const int r = group_->rank_of(peer);
    if (out < 0 || r < out) out = r;
  }
  return out;
}

void MpiOperation::give_up(const std::string& reason) {
  group_->world->abort(reason);
  transfers_.cancel();
}

void MpiOperation::check_calls() {
  std::vector<CollectiveCall> calls;
  for (int r = 0; r < group_->size(); ++r) {
    const Wire theirs = wire(r);
    calls.push_back({.kind = static_cast<Collective>(theirs.kind),
                     .dtype = static_cast<DType>(theirs.dtype),
                     .op = static_cast<ReduceOp>(theirs.op),
                     .root = theirs.root,
                     .elements = theirs.elements});
  }
  if (const auto difference = call_mismatch(calls)) {
    fail(ErrorKind::kComm, "{}: {}", label_, *difference);
  }
}

// Does the whole operation when the calls have brought all of its data.
void MpiOperation::take_carried() {
  const int ranks = group_->size();
  const int64_t bytes = call_.bytes();
  if (call_.kind == Collective::kBroadcast) {
    std::memcpy(call_.recv, carried(call_.root), bytes);
  } else if (call_.kind == Collective::kAllGather) {
    for (int r = 0; r < ranks; ++r) std::memcpy(call_.recv + r * bytes, carried(r), bytes);
  } else {
    // In a reduce_scatter the ranks sent all parts.
    const int64_t offset = call_.kind == Collective::kReduceScatter ? group_->rank * bytes : 0;
    std::vector<const void*> sources;
    for (int r = 0; r < ranks; ++r) sources.push_back(carried(r) + offset);
    reduce(call_.recv, sources, call_.elements, call_.dtype, call_.op);
  }
}

// Exchanges the rows of an all_to_all; those of few ranks came with the calls.
void MpiOperation::exchange_rows() {
  const int ranks = group_->size();
  const int64_t bytes = row_bytes();
  if (carries_rows()) {
    for (int r = 0; r < ranks; ++r) std::memcpy(&rows_[2 * ranks * r], carried(r), bytes);
    return;
  }
  const int tag = group_->world->tag(group_->number, kCallKind);
  with_peers([&](int r, int peer) {
    transfers_.send(peer, tag, &rows_[2 * ranks * group_->rank], bytes);
    transfers_.receive(peer, tag, &rows_[2 * ranks * r], bytes);
  });
}

void MpiOperation::check_rows() {
  const int ranks = group_->size();
  std::vector<CollectiveCall> calls(ranks);
  for (int r = 0; r < ranks; ++r) {
    const auto sends = rows_.begin() + 2 * ranks * r;
    calls[r].send_rows.assign(sends, sends + ranks);
    calls[r].recv_rows.assign(sends + ranks, sends + 2 * ranks);
  }
  if (const auto difference = row_mismatch(calls)) {
    fail(ErrorKind::kComm, "{}: {}", label_, *difference);
  }
}

bool MpiOperation::next_round() {
  switch (call_.kind) {
    case Collective::kBarrier:
      return false;
    case Collective::kAllReduce:
    case Collective::kReduceScatter:
      return reduce_round();
    default:
      if (round_++ > 0) return false;
      move();
      return true;
  }
}

// Runs the operations that only move bytes, in one round.
void MpiOperation::move() {
  const int me = group_->rank;
  const int64_t bytes = call_.bytes();
  if (call_.kind == Collective::kAllGather) {
    with_peers([&](int r, int peer) {
      transfers_.send(peer, tag_, call_.send, bytes);
      transfers_.receive(peer, tag_, call_.recv + r * bytes, bytes);
    });
    copy_bytes(call_.recv + me * bytes, call_.send, bytes);
  } else if (call_.kind == Collective::kAllToAll) {
    const auto outgoing = [&](int r) { return rows_before(call_.send_rows, r) * bytes; };
    const auto incoming = [&](int r) { return rows_before(call_.recv_rows, r) * bytes; };
    with_peers([&](int r, int peer) {
      transfers_.send(peer, tag_, call_.send + outgoing(r), call_.send_rows[r] * bytes);
      transfers_.receive(peer, tag_, call_.recv + incoming(r), call_.recv_rows[r] * bytes);
    });
    copy_bytes(call_.recv + incoming(me), call_.send + outgoing(me), call_.send_rows[me] * bytes);
  } else if (call_.root == me) {
    with_peers([&](int, int peer) { transfers_.send(peer, tag_, call_.send, bytes); });
  } else {
    transfers_.receive(group_->world_ranks[call_.root], tag_, call_.recv, bytes);
  }
}

// Round i: segment i is on its way to be summed, segment i - 1 is summed and, in an all_reduce, on
// its way back.
bool MpiOperation::reduce_round() {
  if (round_ == 0) prepare_segments();
  const bool has_last = round_ > 0 && has_segment(round_ - 1);
  if (!has_last && !has_segment(round_)) return false;
  if (has_segment(round_)) scatter(round_);
  if (has_last) {
    sum(round_ - 1);
    if (call_.kind == Collective::kAllReduce) gather(round_ - 1);
  }
  ++round_;
  return true;
}

void MpiOperation::prepare_segments() {
  const int64_t most =
      std::min(kStagingBytes / (2 * group_->size()), group_->world->options.largest_message);
  segment_elements_ = std::max<int64_t>(1, most / byte_size(call_.dtype, 1));
  const ElementRange first = segment(0, 0);
  slot_bytes_ = round_up(byte_size(call_.dtype, first.end - first.begin), 64);
  const int64_t needed = 2 * group_->size() * slot_bytes_;
  if (staging_->bytes() < needed) *staging_ = Buffer(needed, "staging of a reduction");
}

// Looks at part 0, which is the longest.
bool MpiOperation::has_segment(int64_t index) const {
  const ElementRange first = segment(0, index);
  return first.begin < first.end;
}

// The elements of x (or of send) that are segment `index` of the part of `rank`.
ElementRange MpiOperation::segment(int rank, int64_t index) const {
  const ElementRange part = call_.kind == Collective::kAllReduce
                                ? part_of(call_.elements, rank, group_->size())
                                : ElementRange{rank * call_.elements, (rank + 1) * call_.elements};
  const int64_t begin = std::min(part.end, part.begin + index * segment_elements_);
  return {begin, std::min(part.end, begin + segment_elements_)};
}

// The place for a segment that arrives: two slots per rank, used in turn.
std::byte* MpiOperation::staged(int rank, int64_t index) const {
  return staging_->data() + ((index % 2) * group_->size() + rank) * slot_bytes_;
}

void MpiOperation::scatter(int64_t index) {
  const ElementRange own = segment(group_->rank, index);
  with_peers([&](int r, int peer) {
    const ElementRange theirs = segment(r, index);
    transfers_.send(peer, tag_, call_.send + byte_size(call_.dtype, theirs.begin),
                    byte_size(call_.dtype, theirs.end - theirs.begin));
    transfers_.receive(peer, tag_, staged(r, index), byte_size(call_.dtype, own.end - own.begin));
  });
}

void MpiOperation::sum(int64_t index) {
  const int me = group_->rank;
  const ElementRange own = segment(me, index);
  const std::byte* mine = call_.send + byte_size(call_.dtype, own.begin);
  std::vector<const void*> sources;
  for (int r = 0; r < group_->size(); ++r) sources.push_back(r == me ? mine : staged(r, index));
  // reduce_scatter writes only the part itself.
  const int64_t to =
      call_.kind == Collective::kAllReduce ? own.begin : own.begin - me * call_.elements;
  reduce(call_.recv + byte_size(call_.dtype, to), sources, own.end - own.begin, call_.dtype,
         call_.op);
}

void MpiOperation::gather(int64_t index) {
  const ElementRange own = segment(group_->rank, index);
  with_peers([&](int r, int peer) {
    const ElementRange theirs = segment(r, index);
    transfers_.send(peer, tag_, call_.recv + byte_size(call_.dtype, own.begin),
                    byte_size(call_.dtype, own.end - own.begin));
    transfers_.receive(peer, tag_, call_.recv + byte_size(call_.dtype, theirs.begin),
                       byte_size(call_.dtype, theirs.end - theirs.begin));
  });
}

}  // namespace moiety::comm::mpi
