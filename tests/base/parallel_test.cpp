#include "moiety/base/parallel.h"

#include <atomic>
#include <chrono>
#include <csignal>
#include <ctime>
#include <fstream>
#include <poll.h>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/deadline.h"
#include "moiety/base/error.h"
#include "moiety/base/format.h"
#include "tests/support/error_of.h"

namespace moiety {
namespace {

constexpr Seconds kPatience{30};  // of a machine that has much else to do

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

// The thread that helps this one, which is then between two loops; 0 if there is none.
pid_t helper() {
  const pid_t own = gettid();
  const Deadline limit(kPatience);
  std::atomic<int> begun{0};
  std::atomic<pid_t> other{0};
  parallel_tasks(2, [&](int64_t) {
    if (gettid() != own) other = gettid();
    ++begun;
    while (begun < 2 && !limit.expired()) std::this_thread::yield();  // so each makes one of them
  });
  return other;
}

// Threads that wait for work take no core from whoever has some: after a loop they are soon asleep.
TEST(Parallel, HelpersSleepBetweenLoops) {
  const ThreadBudget budget(2);
  const std::string file = text("/proc/self/task/{}/stat", helper());
  const auto state = [&] {  // "number (name) state ..."
    std::string line;
    std::getline(std::ifstream(file), line);
    return line.substr(line.rfind(')') + 1, 2);
  };
  const Deadline limit(kPatience);
  while (state() != " S" && !limit.expired()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(state(), " S") << file;
}

std::atomic<bool> g_held{false}, g_let_go{false};

// A helper that gets no core in time is not waited for: the caller makes its tasks.
TEST(Parallel, AHelperWithoutACoreIsNotWaitedFor) {
  const ThreadBudget budget(2);
  g_let_go = false;
  const pid_t thread = helper();
  // The handler stands for a system that has other work for the helper's core.
  std::signal(SIGUSR1, [](int) {
    const std::time_t end = std::time(nullptr) + int(kPatience.count());
    g_held = true;
    while (!g_let_go && std::time(nullptr) < end) poll(nullptr, 0, 1);
    g_held = false;
  });
  ASSERT_EQ(tgkill(getpid(), thread, SIGUSR1), 0) << thread;
  for (const Deadline limit(kPatience); !g_held && !limit.expired();) std::this_thread::yield();
  ASSERT_TRUE(g_held);
  std::vector<pid_t> makers(16);
  parallel_tasks(16, [&](int64_t i) { makers[i] = gettid(); });
  EXPECT_TRUE(g_held) << "the loop waited for its helper";
  EXPECT_EQ(makers, std::vector<pid_t>(16, gettid()));
  g_let_go = true;
  while (g_held) std::this_thread::yield();
  std::signal(SIGUSR1, SIG_DFL);
  EXPECT_EQ(helper(), thread);  // it is back
}

}  // namespace
}  // namespace moiety
