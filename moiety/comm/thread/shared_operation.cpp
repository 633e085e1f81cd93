#include "moiety/comm/thread/shared_operation.h"

#include "moiety/base/error.h"
#include "moiety/comm/reduce.h"

namespace moiety::comm::thread {
namespace {

Stage last_stage(Collective kind) {
  switch (kind) {
    case Collective::kBarrier:
      return Stage::kPosted;
    case Collective::kAllReduce:
      return Stage::kShared;
    default:
      return Stage::kWorked;
  }
}

}  // namespace

void SharedOperation::post(int rank, CollectiveCall call) {
  calls_[rank] = std::move(call);
  stages_[rank].value.store(Stage::kPosted, std::memory_order_release);
}

int SharedOperation::waits_for(int rank) const {
  const Stage own = stage(rank);
  for (int r = 0; r < static_cast<int>(stages_.size()); ++r) {
    if (stage(r) < own) return r;
  }
  return -1;
}

Progress SharedOperation::advance(int rank) {
  Progress progress = Progress::kNone;
  while (waits_for(rank) < 0) {
    const Stage own = stage(rank);
    if (own == Stage::kPosted) {
      if (const auto difference = mismatch(calls_)) {
        fail(ErrorKind::kComm, "{}: {}", label_, *difference);
      }
    }
    if (own == last_stage(calls_[rank].kind)) return Progress::kDone;
    begin_touching();
    own == Stage::kPosted ? work(rank) : share(rank);
    end_touching();
    stages_[rank].value.store(own == Stage::kPosted ? Stage::kWorked : Stage::kShared,
                              std::memory_order_release);
    progress = Progress::kMoved;
  }
  if (failed_) throw_failure();
  return progress;
}

void SharedOperation::throw_failure() {
  const std::lock_guard lock(mutex_);
  throw_error(ErrorKind::kComm, failure_);
}

void SharedOperation::begin_touching() {
  {
    const std::lock_guard lock(mutex_);
    if (!failed_) {
      ++busy_;
      return;
    }
  }
  throw_failure();
}

void SharedOperation::end_touching() {
  const std::lock_guard lock(mutex_);
  if (--busy_ == 0) idle_.notify_all();
}

void SharedOperation::give_up(const std::string& reason) {
  std::unique_lock lock(mutex_);
  if (!failed_) failure_ = reason;
  failed_ = true;
  idle_.wait(lock, [&] { return busy_ == 0; });
}

void SharedOperation::work(int rank) {
  const CollectiveCall& mine = calls_[rank];
  const int ranks = static_cast<int>(calls_.size());
  const int64_t bytes = mine.bytes();
  const auto reduce_part = [&](std::byte* to, ElementRange range) {
    const int64_t offset = byte_size(mine.dtype, range.begin);
    std::vector<const void*> sources;
    for (const CollectiveCall& call : calls_) sources.push_back(call.send + offset);
    reduce(to, sources, range.end - range.begin, mine.dtype, mine.op);
  };
  switch (mine.kind) {
    case Collective::kAllReduce: {
      const ElementRange own = part_of(mine.elements, rank, ranks);
      reduce_part(mine.recv + byte_size(mine.dtype, own.begin), own);
      break;
    }
    case Collective::kReduceScatter:
      reduce_part(mine.recv, {rank * mine.elements, (rank + 1) * mine.elements});
      break;
    case Collective::kAllGather:
      for (int r = 0; r < ranks; ++r) copy_bytes(mine.recv + r * bytes, calls_[r].send, bytes);
      break;
    case Collective::kAllToAll:
      for (int r = 0; r < ranks; ++r) {
        copy_bytes(mine.recv + rows_before(mine.recv_rows, r) * bytes,
                   calls_[r].send + rows_before(calls_[r].send_rows, rank) * bytes,
                   mine.recv_rows[r] * bytes);
      }
      break;
    case Collective::kBroadcast:
      copy_bytes(mine.recv, calls_[mine.root].send, bytes);
      break;
    case Collective::kBarrier:
      break;
  }
}

void SharedOperation::share(int rank) {
  const CollectiveCall& mine = calls_[rank];
  const int ranks = static_cast<int>(calls_.size());
  for (int r = 0; r < ranks; ++r) {
    const ElementRange range = part_of(mine.elements, r, ranks);
    const int64_t offset = byte_size(mine.dtype, range.begin);
    copy_bytes(mine.recv + offset, calls_[r].recv + offset,
               byte_size(mine.dtype, range.end - range.begin));
  }
}

}  // namespace moiety::comm::thread
