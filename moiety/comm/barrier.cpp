#include "moiety/comm/barrier.h"

#include "moiety/base/error.h"

namespace moiety::comm {
namespace {

uint64_t* words(std::byte* base, int64_t offset) {
  return reinterpret_cast<uint64_t*>(base + offset);
}

}  // namespace

Barrier::Barrier(Communicator& comm, SymmetricBuffer buffer, int64_t offset, std::string name)
    : comm_(&comm), buffer_(std::move(buffer)), offset_(offset), name_(std::move(name)) {
  MOIETY_CHECK(offset >= 0 && offset % 8 == 0 && offset + bytes(comm.size()) <= buffer_.bytes(),
               "barrier \"{}\": offset {} with {} ranks in a buffer of {} bytes", name_, offset,
               comm.size(), buffer_.bytes());
}

void Barrier::arrive_and_wait() {
  Bootstrap& bootstrap = comm_->bootstrap();
  arrive_and_wait({.deadline = bootstrap.deadline(), .bootstrap = &bootstrap});
}

void Barrier::arrive_and_wait(const WaitLimits& limits) {
  const int me = comm_->rank();
  const uint64_t next = epoch_ + 1;
  for (int r = 0; r < comm_->size(); ++r) {
    store_release(words(buffer_.peer(r), offset_)[me], next);
  }
  uint64_t* inbox = words(buffer_.local(), offset_);
  for (int r = 0; r < comm_->size(); ++r) {
    switch (wait_at_least(inbox[r], next, limits)) {
      case WaitResult::kReady:
        break;
      case WaitResult::kExpired:
        fail(ErrorKind::kComm,
             "barrier \"{}\", epoch {}: rank {} waited {:.1f} s for rank {} (word at {})", name_,
             next, me, limits.deadline.count(), r, load_relaxed(inbox[r]));
      case WaitResult::kPoisoned:
        fail(ErrorKind::kComm, "barrier \"{}\", epoch {}: rank {} was poisoned waiting for rank {}",
             name_, next, me, r);
      case WaitResult::kAborted:
        fail(ErrorKind::kComm, "barrier \"{}\", epoch {}: rank {} stopped waiting for rank {}: {}",
             name_, next, me, r, limits.bootstrap->aborted().value_or(""));
    }
  }
  epoch_ = next;
}

}  // namespace moiety::comm
