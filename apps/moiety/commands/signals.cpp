#include "apps/moiety/commands/signals.h"

#include <atomic>
#include <unistd.h>

#include "apps/moiety/exit_code.h"

namespace moiety::app {
namespace {

constexpr std::array<int, 5> kSignals{SIGINT, SIGTERM, SIGUSR1, SIGHUP, SIGPIPE};

std::atomic<train::TrainRequests*> g_requests{nullptr};
std::atomic<bool> g_interrupted{false};
// Only a lock-free flag is legal in a handler.
static_assert(std::atomic<bool>::is_always_lock_free);
static_assert(std::atomic<train::TrainRequests*>::is_always_lock_free);

void handle(int signal) {
  train::TrainRequests& requests = *g_requests;
  if (signal == SIGUSR1) {
    requests.save = true;
    return;
  }
  if (signal == SIGINT && g_interrupted.exchange(true)) _exit(kExitInterrupted);
  requests.stop = true;
}

}  // namespace

SignalHandlers::SignalHandlers(train::TrainRequests& requests) {
  g_requests = &requests;
  g_interrupted = false;
  for (size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], nullptr, &previous_[i]);
    if (kSignals[i] == SIGHUP && previous_[i].sa_handler == SIG_IGN) continue;  // nohup
    struct sigaction action {};
    action.sa_handler = kSignals[i] == SIGPIPE ? SIG_IGN : handle;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    sigaction(kSignals[i], &action, nullptr);
  }
}

SignalHandlers::~SignalHandlers() {
  for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &previous_[i], nullptr);
}

}  // namespace moiety::app
