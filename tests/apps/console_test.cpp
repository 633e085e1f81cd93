#include "apps/moiety/report/console.h"

#include <algorithm>
#include <cstdlib>

#include <gtest/gtest.h>

namespace moiety::app {
namespace {

Console::Target to_string(std::string& out, ProgressMode progress, bool color) {
  return {[&out](std::string_view s) { out += s; }, [] { return 40; }, progress, color};
}

TEST(Console, PlainLinesHoldNoControlCharacters) {
  std::string out;
  {
    Console console(to_string(out, ProgressMode::kLines, false));
    console.line(LogLevel::kInfo, "one");
    console.status(0.5, "never shown");
    console.line(LogLevel::kError, "two");
  }
  EXPECT_EQ(out, "one\ntwo\n");
}

TEST(Console, LinesScrollAboveTheBar) {
  std::string out;
  Console console(to_string(out, ProgressMode::kBar, false));
  console.status(0.5, "step 1/2");
  const std::string bar = "[===========>          ] step 1/2";
  EXPECT_EQ(out, "\r" + bar + "\x1b[K");
  out.clear();
  console.line(LogLevel::kInfo, "hello");
  EXPECT_EQ(out, "\r\x1b[Khello\n" + bar);
  out.clear();
  console.close();
  EXPECT_EQ(out, "\r\x1b[K");
}

TEST(Console, TheBarIsCutToTheWidth) {
  std::string out;
  Console console(to_string(out, ProgressMode::kBar, false));
  console.status(0, std::string(100, 'x'));
  EXPECT_EQ(out, "\r[>                     ] " + std::string(14, 'x') + "\x1b[K");
}

TEST(Console, TheBarIsRedrawnTenTimesASecondAtMost) {
  std::string out;
  Console console(to_string(out, ProgressMode::kBar, false));
  for (int i = 0; i < 100; ++i) console.status(0.01 * i, "x");
  EXPECT_EQ(std::count(out.begin(), out.end(), '\r'), 1);
  console.status(1, "x");  // the end is always shown
  EXPECT_EQ(std::count(out.begin(), out.end(), '\r'), 2);
}

TEST(Console, ProgressCanBeOff) {
  std::string out;
  Console console(to_string(out, ProgressMode::kOff, false));
  console.status(1, "x");
  EXPECT_EQ(out, "");
}

TEST(Console, WarningsAndErrorsAreColoured) {
  std::string out;
  Console console(to_string(out, ProgressMode::kLines, true));
  console.line(LogLevel::kInfo, "a");
  console.line(LogLevel::kWarning, "b");
  console.line(LogLevel::kError, "c");
  EXPECT_EQ(out, "a\n\x1b[33mb\x1b[0m\n\x1b[31mc\x1b[0m\n");
}

TEST(Console, ChoosesByKeyAndEnvironment) {
  setenv("TERM", "dumb", 1);
  EXPECT_EQ(Console::standard_error("auto", "auto").progress, ProgressMode::kLines);
  EXPECT_FALSE(Console::standard_error("auto", "auto").color);
  EXPECT_EQ(Console::standard_error("bar", "always").progress, ProgressMode::kBar);
  EXPECT_TRUE(Console::standard_error("bar", "always").color);
  EXPECT_EQ(Console::standard_error("off", "never").progress, ProgressMode::kOff);
}

}  // namespace
}  // namespace moiety::app
