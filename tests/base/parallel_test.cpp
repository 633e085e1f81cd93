#include "moiety/base/parallel.h"

#include <atomic>
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

}  // namespace
}  // namespace moiety
