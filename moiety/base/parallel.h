// Loops over the cores. Every host thread has a budget of threads for the loops it starts: ranks
// that are threads of one process share the cores, so 2 ranks on 2 cores use one each. A loop's
// partition never changes a result: bodies write disjoint elements.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace moiety {

// Threads that loops of the calling thread use: at first all cores. Set per host thread; at
// least 1.
int thread_budget();
void set_thread_budget(int threads);
// A budget for a scope; the one before comes back at its end.
class ThreadBudget {
 public:
  explicit ThreadBudget(int threads) : before_(thread_budget()) { set_thread_budget(threads); }
  ~ThreadBudget() { set_thread_budget(before_); }
  ThreadBudget(const ThreadBudget&) = delete;
  ThreadBudget& operator=(const ThreadBudget&) = delete;

 private:
  int before_;
};
// Cores that this process may run on.
int core_count();
// What runs the loops: "OpenMP" or "serial".
const char* loop_engine();

namespace detail {
void parallel_tasks(int64_t tasks, void (*body)(void*, int64_t), void* context);
}

// body(i) for i in [0, tasks), each once, spread dynamically. Exceptions of a body are rethrown
// (one of them) after all bodies ended. Nested calls run serially.
template <class Body>
void parallel_tasks(int64_t tasks, Body&& body) {
  using B = std::remove_reference_t<Body>;
  detail::parallel_tasks(
      tasks, [](void* context, int64_t i) { (*static_cast<B*>(context))(i); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// body(begin, end) over [0, n) in pieces of `grain` elements (the last may be shorter).
template <class Body>
void parallel_for(int64_t n, int64_t grain, Body&& body) {
  grain = std::max<int64_t>(grain, 1);
  parallel_tasks((n + grain - 1) / grain,
                 [&](int64_t i) { body(i * grain, std::min(n, (i + 1) * grain)); });
}

}  // namespace moiety
