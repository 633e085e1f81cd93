#include "tests/checkpoint/process_ranks.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "moiety/base/error.h"
#include "moiety/base/log.h"
#include "moiety/base/parallel.h"

namespace moiety::checkpoint {
namespace {

constexpr int kMostRanks = 4;
constexpr size_t kMostBytes = 64 << 10;

struct Shared {
  std::atomic<uint64_t> entered{0};  // all_gathers, over all ranks
  std::atomic<bool> aborted{false};
  char abort_text[256] = {};
  void abort(int rank, std::string_view text) {
    std::snprintf(abort_text, sizeof abort_text, "rank %d: %.*s", rank,
                  static_cast<int>(text.size()), text.data());
    aborted = true;
  }
  // Messages of even and odd calls, since a rank is at most one call ahead of the slowest.
  struct Message {
    size_t bytes = 0;
    char data[kMostBytes];
  } messages[2][kMostRanks];
};

class ProcessBootstrap : public comm::Bootstrap {
 public:
  ProcessBootstrap(Shared& shared, int rank, int size, Seconds deadline)
      : shared_(shared), rank_(rank), size_(size), deadline_(deadline) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  Seconds deadline() const override { return deadline_; }

  std::vector<std::string> all_gather(std::string_view bytes) override {
    MOIETY_CHECK(bytes.size() <= kMostBytes, "all_gather: {} bytes", bytes.size());
    auto& messages = shared_.messages[call_ % 2];
    messages[rank_].bytes = bytes.size();
    std::memcpy(messages[rank_].data, bytes.data(), bytes.size());
    ++shared_.entered;
    ++call_;
    const Deadline limit(deadline_);
    for (Backoff backoff; shared_.entered < call_ * static_cast<uint64_t>(size_);) {
      if (shared_.aborted) fail(ErrorKind::kComm, "{}", shared_.abort_text);
      if (limit.expired()) fail(ErrorKind::kComm, "rank {}: a peer is missing", rank_);
      backoff.pause();
    }
    std::vector<std::string> out;
    for (int r = 0; r < size_; ++r) out.emplace_back(messages[r].data, messages[r].bytes);
    return out;
  }

  void abort(std::string_view text) noexcept override { shared_.abort(rank_, text); }
  std::optional<std::string> aborted() const override {
    if (!shared_.aborted) return std::nullopt;
    return shared_.abort_text;
  }

 private:
  Shared& shared_;
  int rank_, size_;
  Seconds deadline_;
  uint64_t call_ = 0;
};

[[noreturn]] void run_child(Shared& shared, int rank, int ranks, Seconds deadline,
                            const std::function<void(comm::Bootstrap&)>& body, bool loud) {
  set_thread_budget(1);
  set_log_rank(rank);
  ProcessBootstrap bootstrap(shared, rank, ranks, deadline);
  int status = 0;
  try {
    body(bootstrap);
  } catch (const std::exception& e) {
    if (loud) std::fprintf(stderr, "rank %d: %s\n", rank, e.what());
    status = 1;
  }
  std::fflush(nullptr);
  ::_exit(status);
}

}  // namespace

std::vector<int> run_process_ranks(int ranks, Seconds deadline,
                                   const std::function<void(comm::Bootstrap&)>& body, bool loud) {
  MOIETY_CHECK(ranks >= 1 && ranks <= kMostRanks, "run_process_ranks: {} ranks", ranks);
  void* memory =
      ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("mmap");
  auto& shared = *new (memory) Shared;
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    std::fflush(nullptr);
    const pid_t child = ::fork();
    if (child == 0) run_child(shared, rank, ranks, deadline, body, loud);
    if (child < 0) throw std::runtime_error("fork");
    children.push_back(child);
  }
  std::vector<int> out(children.size());
  for (int left = ranks; left > 0; --left) {
    int status = 0;
    const pid_t child = ::waitpid(-1, &status, 0);
    const auto rank = std::find(children.begin(), children.end(), child) - children.begin();
    out.at(rank) = WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
    if (WIFSIGNALED(status)) shared.abort(static_cast<int>(rank), "was killed");
  }
  ::munmap(memory, sizeof(Shared));
  return out;
}

}  // namespace moiety::checkpoint
