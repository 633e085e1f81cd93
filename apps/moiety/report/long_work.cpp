#include "apps/moiety/report/long_work.h"

#include <algorithm>
#include <utility>

#include "apps/moiety/report/people.h"
#include "moiety/base/log.h"

namespace moiety::app {
namespace {

std::atomic<bool> stop{false};
std::atomic<int> seen{0};
// Only lock-free values are legal in a handler.
static_assert(std::atomic<bool>::is_always_lock_free && std::atomic<int>::is_always_lock_free);

}  // namespace

EndBySignal::EndBySignal() {
  stop = false;
  seen = 0;
  for (size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], nullptr, &previous_[i]);
    if (previous_[i].sa_handler == SIG_IGN) continue;  // nohup
    struct sigaction action {};
    action.sa_handler = [](int signal) {
      seen = signal;
      stop = true;
    };
    sigemptyset(&action.sa_mask);
    action.sa_flags = SA_RESTART;
    sigaction(kSignals[i], &action, nullptr);
  }
}

EndBySignal::~EndBySignal() {
  for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &previous_[i], nullptr);
  if (stop) std::raise(seen);
}

const std::atomic<bool>* EndBySignal::flag() { return &stop; }

ByteProgress::ByteProgress(std::string command, bool quiet) : command_(std::move(command)) {
  if (!quiet) console_.emplace(Console::standard_error("auto", "auto"));
}

void ByteProgress::update(uint64_t done, uint64_t all) {
  if (!console_) return;
  const std::string line = text("{} of {}", bytes_text(int64_t(done)), bytes_text(int64_t(all)));
  console_->status(double(done) / double(std::max<uint64_t>(all, 1)), line);
  const auto now = Clock::now();
  if (console_->has_bar() || now - logged_ < std::chrono::seconds(10)) return;
  logged_ = now;
  log(LogLevel::kInfo, "{}: {}", command_, line);
}

}  // namespace moiety::app
