// Loops over the cores. Every host thread has a budget of threads for the loops it starts: ranks
// that are threads of one process share the cores, so 2 ranks on 2 cores use one each. The way a
// loop is divided never changes a result, since its bodies write disjoint elements.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace moiety {

// The number of threads that loops of the calling thread use, at least 1; all cores until it is
// set.
int thread_budget();
void set_thread_budget(int threads);
// Sets the calling thread's budget for a scope and restores the one before.
class ThreadBudget {
 public:
  explicit ThreadBudget(int threads) : before_(thread_budget()) { set_thread_budget(threads); }
  ~ThreadBudget() { set_thread_budget(before_); }
  ThreadBudget(const ThreadBudget&) = delete;
  ThreadBudget& operator=(const ThreadBudget&) = delete;

 private:
  int before_;
};
// Number of cores that this process may run on.
int core_count();
// The name of the engine that runs the loops: "OpenMP" or "serial".
const char* loop_engine();

namespace detail {
void parallel_tasks(int64_t tasks, void (*body)(void*, int64_t), void* context);
}

// Runs body(i) for i in [0, tasks), each once, spread dynamically. If bodies throw, one of the
// exceptions is rethrown after all bodies have ended. Nested calls run serially.
template <class Body>
void parallel_tasks(int64_t tasks, Body&& body) {
  using B = std::remove_reference_t<Body>;
  detail::parallel_tasks(
      tasks, [](void* context, int64_t i) { (*static_cast<B*>(context))(i); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// Runs body(begin, end) over [0, n) in pieces of `grain` elements; the last may be shorter.
template <class Body>
void parallel_for(int64_t n, int64_t grain, Body&& body) {
  grain = std::max<int64_t>(grain, 1);
  parallel_tasks((n + grain - 1) / grain,
                 [&](int64_t i) { body(i * grain, std::min(n, (i + 1) * grain)); });
}

}  // namespace moiety
