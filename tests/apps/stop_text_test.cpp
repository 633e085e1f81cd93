#include "apps/moiety/commands/stop_text.h"

#include <gtest/gtest.h>

namespace moiety::app {
namespace {

// What is shown of a text that comes byte by byte.
std::string shown(const std::string& text, const std::vector<std::string>& stops) {
  StopText stop(stops);
  std::string out;
  for (const char c : text) out += stop.add(std::string(1, c));
  return out + stop.rest();
}

TEST(StopText, EndsBeforeTheFirstOfThem) {
  EXPECT_EQ(shown("one two three", {"two"}), "one ");
  EXPECT_EQ(shown("one two three", {"three", "tw"}), "one ");
  EXPECT_EQ(shown("one two three", {}), "one two three");
  EXPECT_EQ(shown("one two three", {"four", "thre!"}), "one two three");
  EXPECT_EQ(shown("aaab", {"aab"}), "a");
  EXPECT_EQ(shown("two", {"two"}), "");
}

TEST(StopText, HoldsBackNoMoreThanItMust) {
  StopText stop({"\n\n"});
  EXPECT_EQ(stop.add("a\n"), "a");
  EXPECT_EQ(stop.add("b\nc"), "\nb\nc");
  EXPECT_EQ(stop.add("\nd\n\ne"), "\nd");
  EXPECT_TRUE(stop.met());
  EXPECT_EQ(stop.add("f"), "");
  EXPECT_EQ(stop.rest(), "");
}

}  // namespace
}  // namespace moiety::app
