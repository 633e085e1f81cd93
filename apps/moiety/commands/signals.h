// Signals by which the user controls a running training: SIGUSR1 saves and continues; SIGTERM,
// SIGHUP (a terminal that was closed; not under nohup) or the first SIGINT finishes the step, saves
// and stops; a second SIGINT ends the process at once with 130. SIGPIPE is ignored: a reader of the
// step lines that goes away does not end the training.
#pragma once

#include <array>
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
  std::array<struct sigaction, 5> previous_;
};

}  // namespace moiety::app
