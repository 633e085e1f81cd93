#include "moiety/comm/nccl/group.h"

#include <cstring>
#include <exception>
#include <thread>

#include "moiety/base/error.h"
#include "moiety/base/log.h"

namespace moiety::comm::nccl {
namespace {

constexpr Seconds kPatience{5};

std::string failure(const Functions& f, int code, const char* call) {
  return text("{}: {} ({})", call, f.error_text(code), code);
}

}  // namespace

int run_within_deadline(Bootstrap& bootstrap, const std::string& what, std::function<int()> f) {
  struct Run {
    std::atomic<bool> done{false};
    int code = 0;
  };
  const auto run = std::make_shared<Run>();
  std::thread([run, f = std::move(f)] {
    run->code = f();
    run->done.store(true, std::memory_order_release);
  }).detach();
  const Deadline deadline(bootstrap.deadline());
  Backoff backoff;
  while (!run->done.load(std::memory_order_acquire)) {
    backoff.pause();
    if (!backoff.time_to_look()) continue;
    if (const auto aborted = bootstrap.aborted()) {
      fail(ErrorKind::kComm, "{}: {}", what, *aborted);
    }
    if (deadline.expired()) {
      fail(ErrorKind::kComm, "{}: rank {} waited {:.1f} s for its peers", what, bootstrap.rank(),
           deadline.limit().count());
    }
  }
  return run->code;
}

Group::~Group() {
  const bool unwinding = std::uncaught_exceptions() > 0;
  if (unwinding) abort();
  if (!aborted_) {
    if (const int code = functions_.destroy(group_); code != 0) {
      log(LogLevel::kError, "{}", failure(functions_, code, "ncclCommDestroy"));
    }
  } else if (!unwinding) {
    // What the other thread uses should be there until it has ended.
    const Deadline deadline(kPatience);
    Backoff backoff;
    while (!aborted_->load(std::memory_order_acquire) && !deadline.expired()) backoff.pause();
  }
}

std::shared_ptr<Group> Group::join(const Functions& functions, Bootstrap& bootstrap,
                                   const std::string& what, int device) {
  Id id{};
  std::string mine;
  if (bootstrap.rank() == 0) {
    if (const int code = functions.make_id(&id); code != 0) {
      mine = text("{}: {}", what, failure(functions, code, "ncclGetUniqueId"));
    }
  }
  if (mine.empty()) mine.assign(id.data(), id.size());
  const std::string first = bootstrap.all_gather(mine)[0];
  if (first.size() != id.size()) throw_error(ErrorKind::kComm, first);
  std::memcpy(id.data(), first.data(), id.size());

  const auto made = std::make_shared<void*>(nullptr);
  const int code = run_within_deadline(
      bootstrap, what,
      [&functions, id, ranks = bootstrap.size(), rank = bootstrap.rank(), device, made] {
        return functions.join(id, ranks, rank, device, made.get());
      });
  if (code != 0) {
    fail(ErrorKind::kComm, "{}: {}", what, failure(functions, code, "ncclCommInitRankConfig"));
  }
  return std::make_shared<Group>(functions, *made, device);
}

std::shared_ptr<Group> Group::split(Bootstrap& bootstrap, const std::string& what, int color,
                                    int key) {
  const auto made = std::make_shared<void*>(nullptr);
  const int code = run_within_deadline(
      bootstrap, what, [&f = functions_, parent = group_, color, key, device = device_, made] {
        return f.split(parent, color, key, device, made.get());
      });
  if (code != 0) fail(ErrorKind::kComm, "{}: {}", what, failure(functions_, code, "ncclCommSplit"));
  return *made ? std::make_shared<Group>(functions_, *made, device_) : nullptr;
}

void Group::check(int code, const char* call) const {
  if (code != 0) fail(ErrorKind::kComm, "{}", failure(functions_, code, call));
}

// NCCL ends the operations at once, but then waits for graphs that hold them: on a thread of its own.
void Group::abort() {
  if (aborted_) return;
  aborted_ = std::make_shared<std::atomic<bool>>(false);
  std::thread([&f = functions_, group = group_, done = aborted_] {
    f.abort(group);
    done->store(true, std::memory_order_release);
  }).detach();
}

std::string Group::error() const {
  if (aborted_) return "";
  int code = 0;
  functions_.async_error(group_, &code);
  return code == 0 ? "" : functions_.error_text(code);
}

}  // namespace moiety::comm::nccl
