#include "moiety/base/deadline.h"

#include <thread>

#include <gtest/gtest.h>

namespace moiety {
namespace {

TEST(Deadline, ExpiresAfterItsLimitAndNotBefore) {
  const Deadline far(Seconds(3600)), near(Seconds(0.002)), none(Seconds(0));
  EXPECT_FALSE(far.expired());
  EXPECT_TRUE(none.expired());
  std::this_thread::sleep_for(Seconds(0.003));
  EXPECT_TRUE(near.expired());
  EXPECT_GE(near.elapsed(), near.limit());
}

// The clock is looked at seldom while pauses are short, and at every pause once they are sleeps.
TEST(Backoff, LooksAtTheClockNowAndThen) {
  const auto looks = [](int from, int polls) {
    Backoff backoff;
    for (int i = 0; i < from; ++i) backoff.pause();
    int count = 0;
    for (int i = 0; i < polls; ++i) {
      backoff.pause();
      count += backoff.time_to_look();
    }
    EXPECT_EQ(backoff.polls(), from + polls);
    return count;
  };
  EXPECT_EQ(looks(0, 999), 3);
  EXPECT_EQ(looks(1000, 160), 10);
  EXPECT_EQ(looks(2000, 5), 5);
  set_crowded(true);
  EXPECT_EQ(looks(0, 960), 60);
  set_crowded(false);
}

}  // namespace
}  // namespace moiety
