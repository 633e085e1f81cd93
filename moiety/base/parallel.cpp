#include "moiety/base/parallel.h"

#include <atomic>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <sched.h>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace moiety {
namespace {

constexpr int kMostThreads = 1024;
// The pauses of a thread that has nothing to do, before it sleeps: loops often follow each other
// within some microseconds, and a sleeper's wake costs as much.
constexpr int kPauses = 20000;

thread_local int t_budget = 0;        // 0: not set
thread_local bool t_in_loop = false;  // this thread is at work in a loop

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Waits until the word is no longer `old`: with pauses at first, then asleep.
uint32_t wait_for_change(const std::atomic<uint32_t>& word, uint32_t old) {
  for (int n = 0; n < kPauses; ++n) {
    if (const uint32_t now = word.load(std::memory_order_acquire); now != old) return now;
    pause();
  }
  word.wait(old, std::memory_order_acquire);
  return word.load(std::memory_order_acquire);
}

// A loop as its caller and its helpers see it.
struct Loop {
  void (*body)(void*, int64_t) = nullptr;
  void* context = nullptr;
  int64_t tasks = 0;
  size_t helpers = 0;  // of the team's threads, the first ones
};

// The threads that help one thread with its loops. A loop is open from its begin until its caller
// finds no task left; a helper that comes later stays out, so the caller waits only for tasks that
// are being worked on.
class Team {
 public:
  ~Team() {
    ending_.store(true, std::memory_order_relaxed);
    call_helpers();
    for (std::thread& thread : threads_) thread.join();
  }

  void run(const Loop& loop) {
    grow(loop.helpers);
    loop_ = loop;
    next_.store(0, std::memory_order_relaxed);
    inside_.store(0, std::memory_order_release);
    call_helpers();
    work();
    uint32_t inside = inside_.fetch_or(kClosed, std::memory_order_acq_rel) | kClosed;
    while (inside != kClosed) inside = wait_for_change(inside_, inside);
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  static constexpr uint32_t kClosed = uint32_t{1} << 31;  // of inside_: nobody may come in

  void grow(size_t helpers) {
    try {
      while (threads_.size() < helpers) {
        threads_.emplace_back([this, index = threads_.size()] { help(index); });
      }
    } catch (const std::system_error&) {
      // The system gives no more threads: the loop has fewer helpers.
    }
  }

  void call_helpers() {
    calls_.fetch_add(1, std::memory_order_release);
    calls_.notify_all();
  }

  void help(size_t index) {
    t_budget = 1;
    t_in_loop = true;
    for (uint32_t seen = 0; !ending_.load(std::memory_order_relaxed);) {
      seen = wait_for_change(calls_, seen);
      if (!come_in()) continue;
      if (index < loop_.helpers) work();
      const uint32_t left = inside_.fetch_sub(1, std::memory_order_acq_rel) - 1;
      if (left == kClosed) inside_.notify_one();
    }
  }

  bool come_in() {
    uint32_t inside = inside_.load(std::memory_order_relaxed);
    while (!(inside & kClosed)) {
      if (inside_.compare_exchange_weak(inside, inside + 1, std::memory_order_acquire)) return true;
    }
    return false;
  }

  void work() {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < loop_.tasks;) {
      try {
        loop_.body(loop_.context, i);
      } catch (...) {
        const std::lock_guard lock(error_mutex_);
        if (!error_) error_ = std::current_exception();
      }
    }
  }

  Loop loop_;
  std::mutex error_mutex_;
  std::exception_ptr error_;
  std::vector<std::thread> threads_;
  std::atomic<bool> ending_{false};
  alignas(64) std::atomic<uint32_t> calls_{0};         // grows with every loop
  alignas(64) std::atomic<uint32_t> inside_{kClosed};  // helpers at work in the loop
  alignas(64) std::atomic<int64_t> next_{0};           // the first task that nobody has taken
};

}  // namespace

int core_count() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

int environment_threads(int otherwise) {
  static const int allowed = [] {
    const char* text = std::getenv("OMP_NUM_THREADS");
    return text ? std::clamp(std::atoi(text), 0, kMostThreads) : 0;
  }();
  return allowed > 0 ? allowed : otherwise;
}

int thread_budget() { return t_budget > 0 ? t_budget : environment_threads(core_count()); }

void set_thread_budget(int threads) { t_budget = std::clamp(threads, 1, kMostThreads); }

void detail::parallel_tasks(int64_t tasks, void (*body)(void*, int64_t), void* context) {
  const int64_t threads = std::min<int64_t>(thread_budget(), tasks);
  if (threads <= 1 || t_in_loop) {
    for (int64_t i = 0; i < tasks; ++i) body(context, i);
    return;
  }
  thread_local Team team;
  struct InLoop {
    InLoop() { t_in_loop = true; }
    ~InLoop() { t_in_loop = false; }
  } const in_loop;
  team.run({body, context, tasks, static_cast<size_t>(threads - 1)});
}

}  // namespace moiety
