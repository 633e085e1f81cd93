#include "moiety/base/printable.h"

#include <gtest/gtest.h>

namespace moiety {
namespace {

TEST(Printable, IsOneLineWithoutControlCharacters) {
  EXPECT_EQ(printable("a b"), "a b");
  EXPECT_EQ(printable("a\nb\tc\x1b[1m\x7f"), "a\\nb\\tc\\x1b[1m\\x7f");
  EXPECT_EQ(printable(std::string_view("\0", 1)), "\\x00");
  EXPECT_EQ(printable("gr\xc3\xbc\xc3\x9f"), "gr\xc3\xbc\xc3\x9f");
}

TEST(Printable, LongTextsLoseTheirMiddle) {
  EXPECT_EQ(printable("0123456789", 10), "0123456789");
  EXPECT_EQ(printable("0123456789a", 8), "012345...(3 bytes)...9a");
  // Characters are not cut: five umlauts are ten bytes.
  EXPECT_EQ(printable("\xc3\xbc\xc3\xbc\xc3\xbc\xc3\xbc\xc3\xbc", 8),
            "\xc3\xbc\xc3\xbc\xc3\xbc...(2 bytes)...\xc3\xbc");
  EXPECT_EQ(printable("\xc3\xbc\xc3\xbc\xc3\xbc\xc3\xbc\xc3\xbc", 4), "\xc3\xbc...(8 bytes)...");
}

TEST(Printable, AParsersTextWithoutItsNumber) {
  EXPECT_EQ(parser_text("[json.exception.out_of_range.403] key 'a' not found"),
            "key 'a' not found");
  EXPECT_EQ(parser_text("no brackets] here"), "no brackets] here");
}

}  // namespace
}  // namespace moiety
