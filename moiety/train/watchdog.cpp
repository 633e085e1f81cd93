#include "moiety/train/watchdog.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <execinfo.h>
#include <unistd.h>

#include "moiety/base/format.h"
#include "moiety/train/failure_file.h"

namespace moiety::train {
namespace {

int64_t now_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The signal that asks a thread for its stack, which it answers in a handler.
constexpr int kStackSignal = SIGUSR2;
constexpr int kMaxFrames = 48;
// A tick that comes later than this was not only held up by a busy machine.
constexpr Seconds kLatestTick{0.1};
void* g_frames[kMaxFrames];
std::atomic<int> g_frame_count{-1};

// The function with which the alarm ends the process, should the disk hang.
std::atomic<Watchdog::EndProcess> g_end_process{nullptr};

void take_stack(int) { g_frame_count = ::backtrace(g_frames, kMaxFrames); }

void listen_for_stack_signal() {
  void* frame[1];
  ::backtrace(frame, 1);  // loads what it needs, which a handler must not
  struct sigaction action {};
  action.sa_handler = take_stack;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(kStackSignal, &action, nullptr);
}

std::string stack_json(pthread_t thread) {
  std::string list;
  for (const std::string& frame : stack_of(thread)) {
    const std::string quoted = JsonLine().add("f", frame).text();  // {"f":"..."}
    list += (list.empty() ? "" : ", ") + quoted.substr(5, quoted.size() - 6);
  }
  return "[" + list + "]";
}

}  // namespace

std::vector<std::string> stack_of(pthread_t thread) {
  g_frame_count = -1;
  std::vector<std::string> out;
  if (pthread_kill(thread, kStackSignal) != 0) return out;
  for (int i = 0; i < 200 && g_frame_count < 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const int count = std::max(0, g_frame_count.load());
  char** names = ::backtrace_symbols(g_frames, count);
  // without the frames of the handler
  for (int i = 2; names && i < count; ++i) out.emplace_back(names[i]);
  std::free(names);
  return out;
}

Heartbeat::Heartbeat(Watchdog* watchdog, int rank)
    : watchdog_(watchdog), rank_(rank), thread_(pthread_self()), since_(now_ns()) {
  if (!watchdog_) return;
  const std::lock_guard lock(watchdog_->mutex_);
  watchdog_->ranks_.push_back(this);
}

Heartbeat::~Heartbeat() {
  if (!watchdog_) return;
  const std::lock_guard lock(watchdog_->mutex_);
  std::erase(watchdog_->ranks_, this);
}

void Heartbeat::restart() { since_ = now_ns(); }

void Heartbeat::forgive(int64_t ns) { since_ = std::min(now_ns(), since_ + ns); }

void Heartbeat::step(int64_t completed) {
  step_ = completed;
  patience_ = 1;
  restart();
}

void Heartbeat::begin_aside(const char* name) {
  phase(name);
  patience_ = kPatience;
  restart();
}

void Heartbeat::end_aside() {
  restart();
  patience_ = 1;
}

double Heartbeat::silent_seconds() const { return 1e-9 * double(now_ns() - since_); }

Watchdog::Watchdog(Seconds limit, std::filesystem::path run_directory, EndProcess end_process)
    : limit_(limit), run_directory_(std::move(run_directory)), end_process_(end_process) {
  listen_for_stack_signal();
  thread_ = std::thread([this] { watch(); });
}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stopped_.notify_all();
  thread_.join();
}

void Watchdog::watch() {
  const auto pause = std::min(Seconds(1), limit_ / 4);
  std::unique_lock lock(mutex_);
  for (;;) {
    const int64_t before = now_ns();
    if (stopped_.wait_for(lock, pause, [&] { return stop_; })) return;
    const double late_s = 1e-9 * double(now_ns() - before) - pause.count();
    if (late_s > kLatestTick.count()) {
      for (Heartbeat* rank : ranks_) rank->forgive(int64_t(1e9 * late_s));
    }
    for (const Heartbeat* rank : ranks_) {
      if (rank->silent_seconds() > rank->patience_ * limit_.count()) end(*rank);
    }
  }
}

// Ends the process. The mutex is held, so that no rank leaves. The disk may be the cause of the
// hang, so the message comes first, and files get five seconds.
void Watchdog::end(const Heartbeat& silent) {
  std::string ranks;
  for (const Heartbeat* rank : ranks_) {
    ranks += (ranks.empty() ? "" : ", ") + JsonLine()
                                               .add("rank", rank->rank())
                                               .add("step", rank->completed() + 1)
                                               .add("phase", rank->phase())
                                               .add("silent_s", rank->silent_seconds())
                                               .text();
  }
  const std::string message = text(
      "rank {}: watchdog: no step was completed for {:.1f} s (guard.watchdog_s = {}): step {}, {}",
      silent.rank(), silent.silent_seconds(), limit_.count(), silent.completed() + 1,
      silent.phase());
  std::fprintf(stderr, "moiety: %s\n", message.c_str());
  std::fflush(stderr);
  g_end_process = end_process_;
  std::signal(SIGALRM, [](int) { g_end_process.load()(); });
  ::alarm(5);
  for (const Heartbeat* rank : ranks_) {
    JsonLine fields;
    fields.add("message", message)
        .add("phase", rank->phase())
        .add("silent_s", rank->silent_seconds())
        .raw("ranks_of_process", "[" + ranks + "]")
        .raw("stack", stack_json(rank->thread_));
    write_failure(run_directory_, "watchdog", rank->rank(), rank->completed() + 1, fields);
  }
  end_process_();
  std::abort();  // the function has returned
}

}  // namespace moiety::train
