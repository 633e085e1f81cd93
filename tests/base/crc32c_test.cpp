#include "moiety/base/crc32c.h"

#include <gtest/gtest.h>

namespace moiety {
namespace {

TEST(Crc32c, GoldenAndContinuation) {
  EXPECT_EQ(crc32c("123456789"), 0xE3069283u);
  EXPECT_EQ(crc32c("6789", 4, crc32c("12345")), 0xE3069283u);
  EXPECT_EQ(crc32c(""), 0u);
}

}  // namespace
}  // namespace moiety
