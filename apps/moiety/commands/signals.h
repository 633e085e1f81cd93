// What the user asks of a running training: SIGUSR1 saves and goes on; SIGTERM or the first SIGINT
// finishes the step, saves and stops; a second SIGINT ends the process at once with 130.
#pragma once

#include <csignal>

namespace moiety::app {

enum class SignalRequest : int { kNone = 0, kSave = 1, kStop = 2 };

// Handles the signals during its lifetime; one at a time.
class SignalHandlers {
 public:
  SignalHandlers();
  ~SignalHandlers();
  SignalHandlers(const SignalHandlers&) = delete;
  SignalHandlers& operator=(const SignalHandlers&) = delete;

  // The strongest request since the last call; kStop stays.
  static SignalRequest take();

 private:
  struct sigaction previous_[3];
};

}  // namespace moiety::app
