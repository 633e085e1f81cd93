#include "moiety/base/stream.h"

#include <gtest/gtest.h>

#include "tests/support/error_of.h"

namespace moiety {
namespace {

TEST(Stream, DeferredStreamShowsMissingEdges) {
  const Stream a = Stream::deferred(), b = Stream::deferred();
  int x = 0, seen = -1;
  a.run([&] { x = 1; });
  Event ready;
  ready.record(a);
  a.run([&] { x = 2; });
  b.run([&] { seen = x; });
  b.synchronize();
  EXPECT_EQ(seen, 0);  // no edge: b did not see a
  b.wait(ready);
  b.run([&] { seen = x; });
  EXPECT_FALSE(ready.complete());
  b.synchronize();
  EXPECT_EQ(seen, 1);
  EXPECT_TRUE(ready.complete());
  a.synchronize();
  EXPECT_EQ(x, 2);
  Stream().run([&] { x = 3; });
  EXPECT_EQ(x, 3);
}

TEST(Event, TimedOnACpu) {
  const Stream stream = Stream::deferred();
  Event begin = Event::timed(), end = Event::timed();
  begin.record(stream);
  int64_t spun = 0;
  stream.run([&] {
    while (spun < 1000000) spun = spun + 1;
  });
  end.record(stream);
  EXPECT_NE(error_of([&] { elapsed_ms(begin, end); }), kNoError);  // not yet
  end.wait();
  EXPECT_EQ(spun, 1000000);
  EXPECT_GT(elapsed_ms(begin, end), 0);
  EXPECT_LT(elapsed_ms(begin, end), 60000);
  EXPECT_EQ(elapsed_ms(begin, begin), 0);
  EXPECT_EQ(error_of([&] { elapsed_ms(begin, Event()); }), "elapsed_ms: an event is not timed");
}

TEST(Event, ACopyKeepsItsPoint) {
  const Stream stream = Stream::deferred();
  Event a;
  a.record(stream);
  const Event b = a;
  stream.run([] {});
  a.record(stream);
  EXPECT_TRUE(b.complete());
  EXPECT_FALSE(a.complete());
}

}  // namespace
}  // namespace moiety
