#include "apps/moiety/report/people.h"

#include <gtest/gtest.h>

namespace moiety::app {
namespace {

TEST(People, CountsHaveTheirNouns) {
  EXPECT_EQ(counted(1, "document"), "1 document");
  EXPECT_EQ(counted(0, "document"), "0 documents");
  EXPECT_EQ(counted(2, "micro-batch"), "2 micro-batches");
}

TEST(People, AmountsHaveThreeDigitsAndAUnit) {
  EXPECT_EQ(amount_text(0), "0");
  EXPECT_EQ(amount_text(999), "999");
  EXPECT_EQ(amount_text(1577728), "1.58 M");
  EXPECT_EQ(amount_text(30532122624.0), "30.5 B");
  EXPECT_EQ(amount_text(235e9), "235 B");
  EXPECT_EQ(amount_text(999.6e3), "1.00 M");
}

}  // namespace
}  // namespace moiety::app
