#include "moiety/capi/interrupt.h"

#include <chrono>
#include <future>
#include <mutex>
#include <unistd.h>

#include "moiety/base/parallel.h"
#include "moiety/capi/guarded.h"
#include "moiety/checkpoint/interrupt.h"

namespace moiety::capi {
namespace {

// Functions of the interpreter of Python, by their types there.
struct Interpreter {
  int (*ensure)() = nullptr;       // PyGILState_Ensure
  void (*release)(int) = nullptr;  // PyGILState_Release
  int (*check)() = nullptr;        // PyErr_CheckSignals
  void (*clear)() = nullptr;       // PyErr_Clear

  // Runs the handlers of signals that have come; whether one of them raised.
  bool asks() const {
    const int state = ensure();
    const bool raised = check() != 0;
    if (raised) clear();
    release(state);
    return raised;
  }
};

std::mutex mutex;
Interpreter interpreter;

// Asking from another thread, while the interpreter ends, would end the process.
bool on_main_thread() { return ::getpid() == ::gettid(); }

}  // namespace

int interruptible(const std::function<int()>& work) {
  const Interpreter now = [] {
    const std::lock_guard lock(mutex);
    return interpreter;
  }();
  if (!now.ensure || !on_main_thread()) return work();
  std::string text;
  const int budget = thread_budget();
  std::future<int> done = std::async(std::launch::async, [&] {
    const ThreadBudget threads(budget);
    const int code = work();
    text = last_error();
    return code;
  });
  bool asked = false;
  while (done.wait_for(std::chrono::milliseconds(100)) != std::future_status::ready) {
    if (asked || !now.asks()) continue;
    asked = true;
    interrupt_wanted = true;
  }
  interrupt_wanted = false;
  const int code = done.get();
  last_error() = asked ? "interrupted" : text;
  return asked ? MOIETY_INTERRUPTED : code;
}

}  // namespace moiety::capi

using namespace moiety::capi;  // NOLINT: the function below is C's

int moiety_set_interrupt(void* ensure, void* release, void* check_signals, void* clear_error) {
  return guarded([&] {
    MOIETY_CHECK(ensure && release && check_signals && clear_error,
                 "set_interrupt: the address of a function is null");
    const std::lock_guard lock(mutex);
    interpreter = {reinterpret_cast<int (*)()>(ensure), reinterpret_cast<void (*)(int)>(release),
                   reinterpret_cast<int (*)()>(check_signals),
                   reinterpret_cast<void (*)()>(clear_error)};
  });
}
