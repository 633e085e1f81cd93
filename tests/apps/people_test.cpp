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

TEST(People, TimesAreInTheUnitThatFits) {
  EXPECT_EQ(seconds_text(0.00000023), "0.00 ms");
  EXPECT_EQ(seconds_text(0.00023), "0.23 ms");
  EXPECT_EQ(seconds_text(0.0023), "2.3 ms");
  EXPECT_EQ(seconds_text(0.0412), "41.2 ms");
  EXPECT_EQ(seconds_text(1.42), "1.4 s");
  EXPECT_EQ(seconds_text(142), "142 s");
}

}  // namespace
}  // namespace moiety::app
