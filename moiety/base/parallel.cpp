#include "moiety/base/parallel.h"

#include <exception>
#include <mutex>
#include <sched.h>
#include <thread>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace moiety {
namespace {

thread_local int t_budget = 0;  // 0: not set, so all cores

}  // namespace

int core_count() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

int thread_budget() { return t_budget > 0 ? t_budget : core_count(); }

void set_thread_budget(int threads) {
  t_budget = std::max(1, threads);
#ifdef _OPENMP
  omp_set_num_threads(t_budget);  // libraries that use OpenMP keep to the budget too
#endif
}

#ifdef _OPENMP

const char* loop_engine() { return "OpenMP"; }

void detail::parallel_tasks(int64_t tasks, void (*body)(void*, int64_t), void* context) {
  const int threads = static_cast<int>(std::min<int64_t>(thread_budget(), tasks));
  if (threads <= 1 || omp_in_parallel()) {
    for (int64_t i = 0; i < tasks; ++i) body(context, i);
    return;
  }
  std::exception_ptr error;
  std::mutex mutex;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t i = 0; i < tasks; ++i) {
    try {
      body(context, i);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
}

#else

const char* loop_engine() { return "serial"; }

void detail::parallel_tasks(int64_t tasks, void (*body)(void*, int64_t), void* context) {
  for (int64_t i = 0; i < tasks; ++i) body(context, i);
}

#endif

}  // namespace moiety
