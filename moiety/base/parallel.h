// Loops over the cores. Every host thread has a budget of threads for the loops it starts: ranks
// that are threads of one process share the cores, so 2 ranks on 2 cores use one each. The way a
// loop is divided never changes a result, since its bodies write disjoint elements.
//
// A thread that starts loops has a team of its own, which helps where it gets a core in time: the
// caller works on the loop itself and waits for nobody who has not begun, so a machine that is busy
// with something else makes a loop slower by what it takes, not more (parallel.cpp).
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace moiety {

// The number of threads that loops of the calling thread use, at least 1; until it is set,
// OMP_NUM_THREADS or all cores.
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
// OMP_NUM_THREADS, the threads that the environment allows this process; `otherwise` where it is
// not set, or is not a number above 0.
int environment_threads(int otherwise);

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
