// Signals by which the user controls a running training: SIGUSR1 saves and continues; SIGTERM or
// the first SIGINT finishes the step, saves and stops; a second SIGINT ends the process at once
// with 130.
#pragma once

#include <csignal>

#include "moiety/train/plan.h"

namespace moiety::app {

// Turns the signals into requests during its lifetime; only one object at a time.
class SignalHandlers {
 public:
  explicit SignalHandlers(train::TrainRequests& requests);
  ~SignalHandlers();
  SignalHandlers(const SignalHandlers&) = delete;
  SignalHandlers& operator=(const SignalHandlers&) = delete;

 private:
  struct sigaction previous_[3];
};

}  // namespace moiety::app
