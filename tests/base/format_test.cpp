#include "moiety/base/format.h"

#include <gtest/gtest.h>

namespace moiety {
namespace {

TEST(Format, ArgumentsAndBadFormats) {
  EXPECT_EQ(text("{} of {:.2f} at {}", "x", 1.5, int64_t{-3}), "x of 1.50 at -3");
  EXPECT_NE(text("{} {}", 1).find("bad format"), std::string::npos);
  EXPECT_EQ(bytes_text(640), "640 B");
  EXPECT_EQ(bytes_text(int64_t{3} << 19), "1.5 MiB");
}

}  // namespace
}  // namespace moiety
