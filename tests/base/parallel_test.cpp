#include "moiety/base/parallel.h"

#include <atomic>
#include <chrono>
#include <ctime>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/error.h"
#include "tests/support/error_of.h"

namespace moiety {
namespace {

TEST(Parallel, EachTaskOnceAndErrorsArrive) {
  for (int budget : {1, 2, 3}) {
    set_thread_budget(budget);
    std::vector<std::atomic<int>> seen(1000);
    parallel_for(1000, 7, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) ++seen[i];
    });
    for (const auto& s : seen) ASSERT_EQ(s, 1);
    EXPECT_EQ(
        error_of([] { parallel_tasks(8, [](int64_t i) { MOIETY_CHECK(i != 5, "task {}", i); }); }),
        "task 5");
    parallel_for(0, 16, [](int64_t, int64_t) { FAIL(); });
  }
  set_thread_budget(core_count());
}

TEST(Parallel, LoopsOfSeveralThreadsDoNotMix) {
  std::vector<std::thread> callers;
  for (int c = 0; c < 3; ++c) {
    callers.emplace_back([] {
      for (int round = 0; round < 300; ++round) {
        const ThreadBudget budget(1 + round % 4);
        std::vector<int> seen(20);
        parallel_tasks(20, [&](int64_t i) {
          parallel_tasks(2, [&](int64_t) { ++seen[i]; });  // nested: this task's thread makes both
        });
        ASSERT_EQ(seen, std::vector<int>(20, 2));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

// Threads that wait for work take no core from whoever has some: after a loop they are soon asleep.
TEST(Parallel, HelpersSleepBetweenLoops) {
  const ThreadBudget budget(2);
  const std::clock_t before = std::clock();
  for (int round = 0; round < 20; ++round) {
    parallel_tasks(2, [](int64_t) {});
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_LT(double(std::clock() - before) / CLOCKS_PER_SEC, 0.03) << "of 0.2 s";
}

// A helper that gets no core in time is not waited for: the caller makes its tasks.
TEST(Parallel, ABusyMachineMakesLoopsSlowerByWhatItTakes) {
  using Clock = std::chrono::steady_clock;
  const ThreadBudget budget(2);
  const auto seconds = [] {
    const Clock::time_point start = Clock::now();
    for (int round = 0; round < 2000; ++round) {
      parallel_tasks(16, [](int64_t) {
        for (volatile int i = 0; i < 500;) i = i + 1;
      });
    }
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  seconds();
  const double quiet = seconds();
  std::atomic<bool> over{false};
  std::vector<std::thread> busy;
  for (int n = 0; n < core_count(); ++n) {
    busy.emplace_back([&] {
      while (!over) {
      }
    });
  }
  const double beside = seconds();
  over = true;
  for (std::thread& thread : busy) thread.join();
  EXPECT_LT(beside, 8 * quiet + 0.1) << "quiet " << quiet << " s";
}

}  // namespace
}  // namespace moiety
