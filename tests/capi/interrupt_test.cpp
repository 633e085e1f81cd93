// A call that takes long ends when the interpreter says that a handler raised, and only then.
#include "moiety/capi/interrupt.h"

#include <atomic>
#include <thread>

#include <gtest/gtest.h>

#include "moiety/base/deadline.h"
#include "moiety/base/error.h"
#include "moiety/capi/guarded.h"
#include "moiety/checkpoint/interrupt.h"

namespace moiety::capi {
namespace {

// Stand-ins for the interpreter's functions.
std::atomic<int> held, asked, cleared, raise_at;
int ensure() { return ++held, 7; }
void release(int state) { held -= state == 7 ? 1 : 100; }
int check() { return ++asked == raise_at ? -1 : 0; }
void clear() { ++cleared; }

void* address(auto* function) { return reinterpret_cast<void*>(function); }

// Works in pieces for so long, unless it is told to end.
int work_for(Seconds time) {
  return guarded([&] {
    for (const Deadline end(time); !end.expired();) {
      check_interrupt();
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    EXPECT_NE(std::this_thread::get_id(), std::thread::id());
  });
}

void set_up(int raise) {
  held = asked = cleared = 0;
  raise_at = raise;
  ASSERT_EQ(
      moiety_set_interrupt(address(&ensure), address(&release), address(&check), address(&clear)),
      MOIETY_OK);
}

TEST(Interrupts, EndALongCall) {
  set_up(2);
  const Deadline limit(Seconds(20));
  EXPECT_EQ(interruptible([] { return work_for(Seconds(20)); }), MOIETY_INTERRUPTED);
  EXPECT_FALSE(limit.expired());
  EXPECT_STREQ(moiety_last_error(), "interrupted");
  EXPECT_EQ(asked, 2);
  EXPECT_EQ(cleared, 1);
  EXPECT_EQ(held, 0);
  EXPECT_FALSE(interrupted());
  raise_at = 0;  // the next call is a new one
  EXPECT_EQ(interruptible([] { return work_for(Seconds(0.25)); }), MOIETY_OK);
  EXPECT_GE(asked, 3);
}

TEST(Interrupts, ErrorsKeepTheirTexts) {
  set_up(0);
  EXPECT_EQ(interruptible([] { return guarded([] { fail(ErrorKind::kData, "why"); }); }),
            MOIETY_DATA);
  EXPECT_STREQ(moiety_last_error(), "why");
}

TEST(Interrupts, OtherThreadsNeverAsk) {
  set_up(1);
  std::thread([] {
    EXPECT_EQ(interruptible([] { return work_for(Seconds(0.25)); }), MOIETY_OK);
  }).join();
  EXPECT_EQ(asked, 0);
}

TEST(Interrupts, NullIsRefused) {
  EXPECT_EQ(moiety_set_interrupt(nullptr, nullptr, nullptr, nullptr), MOIETY_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace moiety::capi
