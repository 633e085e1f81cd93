#include "moiety/base/log.h"

#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

namespace moiety {
namespace {

class Log : public testing::Test {
 protected:
  void SetUp() override {
    set_log_sink([this](LogLevel, std::string_view line) { lines.emplace_back(line); });
  }
  void TearDown() override {
    set_log_sink({});
    set_log_level(LogLevel::kInfo);
    set_log_rank(-1);
  }

  std::vector<std::string> lines;
};

TEST_F(Log, LinesBelowTheLevelAreDropped) {
  log(LogLevel::kDebug, "a");
  log(LogLevel::kInfo, "{} of {}", 1, 2);
  set_log_level(LogLevel::kError);
  log(LogLevel::kWarning, "b");
  log(LogLevel::kError, "c");
  set_log_level(LogLevel::kOff);
  log(LogLevel::kError, "d");
  EXPECT_EQ(lines, (std::vector<std::string>{"1 of 2", "error: c"}));
}

TEST_F(Log, LinesNameTheRankOfTheirThread) {
  set_log_rank(3);
  log(LogLevel::kWarning, "here");
  std::thread([] { log(LogLevel::kInfo, "there"); }).join();
  EXPECT_EQ(log_rank(), 3);
  EXPECT_EQ(lines, (std::vector<std::string>{"warning: [rank 3] here", "there"}));
}

}  // namespace
}  // namespace moiety
