#include "moiety/data/utf8_stream.h"

#include <string>

#include <gtest/gtest.h>

namespace moiety::data {
namespace {

// The text in parts of `n` bytes.
std::string through(const std::string& text, size_t n) {
  Utf8Stream stream;
  std::string out;
  for (size_t at = 0; at < text.size(); at += n) out += stream.add(text.substr(at, n));
  return out + stream.rest();
}

TEST(Utf8Stream, HoldsCharactersUntilTheyAreWhole) {
  Utf8Stream stream;
  EXPECT_EQ(stream.add("a\xf0\x9f"), "a");
  EXPECT_EQ(stream.add("\x98"), "");
  EXPECT_EQ(stream.add("\x80"
                       "b\xc3"),
            "\xf0\x9f\x98\x80"
            "b");
  EXPECT_EQ(stream.add("\xa9"), "\xc3\xa9");
  EXPECT_EQ(stream.rest(), "");
}

TEST(Utf8Stream, WhatIsNoUtf8IsReplaced) {
  const std::string fffd = "\xef\xbf\xbd";
  EXPECT_EQ(through("a\xff"
                    "b\xc3",
                    1),
            "a" + fffd + "b" + fffd);
  EXPECT_EQ(through("\xe2\x82"
                    "x",
                    2),
            fffd + "x")
      << "a character that was cut";
  EXPECT_EQ(through("\xc0\xaf", 1), fffd + fffd) << "an overlong form";
  EXPECT_EQ(through("\xed\xa0\x80", 3), fffd + fffd + fffd) << "a surrogate";
  EXPECT_EQ(through("\xf4\x90\x80\x80", 1), fffd + fffd + fffd + fffd) << "above U+10FFFF";
}

TEST(Utf8Stream, PartsChangeNothing) {
  const std::string text = "a\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\xff\xe2\x28\xa1\xf0\x9f\xc3";
  for (const size_t n : {1, 2, 3, 5}) EXPECT_EQ(through(text, n), through(text, 100)) << n;
}

}  // namespace
}  // namespace moiety::data
