#include "moiety/train/watchdog.h"

#include <atomic>
#include <chrono>
#include <thread>
#include <unistd.h>
#include <vector>

#include <gtest/gtest.h>

#include "tests/data/data_helpers.h"

namespace moiety::train {
namespace {

TEST(Watchdog, SeesWhereAThreadStands) {
  const TemporaryDirectory dir;
  const Watchdog installs_the_handler(Seconds(100), dir / "r", [] { ::_exit(1); });
  std::atomic<bool> stop{false};
  std::thread sleeper([&] {
    while (!stop) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  });
  const std::vector<std::string> stack = stack_of(sleeper.native_handle());
  stop = true;
  sleeper.join();
  EXPECT_GE(stack.size(), 2u);
}

// A death test: the message comes first, then the files, then the caller's function.
TEST(Watchdog, EndsTheProcessInTheWayOfItsCaller) {
  const TemporaryDirectory dir;
  const auto hang = [&] {
    Watchdog watchdog(Seconds(0.05), dir / "r", [] { ::_exit(23); });
    Heartbeat heartbeat(&watchdog, 0);
    heartbeat.step(3);
    heartbeat.phase("forward");
    std::this_thread::sleep_for(std::chrono::seconds(20));
  };
  EXPECT_EXIT(hang(), testing::ExitedWithCode(23), "no step was completed for .*: step 4, forward");
  EXPECT_NE(read_all(dir / "r/failures/rank0-step4.json").find("\"kind\": \"watchdog\""),
            std::string::npos);
}

TEST(Watchdog, HeartbeatsDoWithoutOne) {
  Heartbeat heartbeat(nullptr, 2);
  heartbeat.step(5);
  { const Heartbeat::Aside aside(heartbeat, "evaluation"); }
  EXPECT_EQ(heartbeat.completed(), 5);
  EXPECT_STREQ(heartbeat.phase(), "evaluation");
}

}  // namespace
}  // namespace moiety::train
