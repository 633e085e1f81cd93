#include "apps/moiety/commands/signals.h"

#include <atomic>
#include <unistd.h>

#include "apps/moiety/exit_code.h"

namespace moiety::app {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM, SIGUSR1};

std::atomic<bool> g_save{false};
std::atomic<bool> g_stop{false};
std::atomic<bool> g_interrupted{false};
static_assert(std::atomic<bool>::is_always_lock_free);  // legal in a handler

void handle(int signal) {
  if (signal == SIGUSR1) {
    g_save = true;
    return;
  }
  if (signal == SIGINT && g_interrupted.exchange(true)) _exit(kExitInterrupted);
  g_stop = true;
}

}  // namespace

SignalHandlers::SignalHandlers() {
  g_save = g_stop = g_interrupted = false;
  struct sigaction action {};
  action.sa_handler = handle;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &action, &previous_[i]);
}

SignalHandlers::~SignalHandlers() {
  for (int i = 0; i < 3; ++i) sigaction(kSignals[i], &previous_[i], nullptr);
}

SignalRequest SignalHandlers::take() {
  const bool save = g_save.exchange(false);
  if (g_stop) return SignalRequest::kStop;
  return save ? SignalRequest::kSave : SignalRequest::kNone;
}

}  // namespace moiety::app
