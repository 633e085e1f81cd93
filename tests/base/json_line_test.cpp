#include "moiety/base/json_line.h"

#include <limits>
#include <vector>

#include <gtest/gtest.h>

namespace moiety {
namespace {

TEST(JsonLine, KeysKeepTheirOrderAndValuesTheirTypes) {
  JsonLine line;
  line.add("step", int64_t{7}).add("loss", 0.1).add("done", true).add("name", "a \"b\"\n");
  line.raw("list", "[1,{}]");
  EXPECT_EQ(line.text(), R"({"step":7,"loss":0.1,"done":true,"name":"a \"b\"\n","list":[1,{}]})");
  EXPECT_EQ(JsonLine().text(), "{}");
}

TEST(JsonLine, NumbersThatJsonDoesNotHaveAreStrings) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const std::vector<double> values{1e-5, std::numeric_limits<double>::quiet_NaN(), kInfinity,
                                   -kInfinity};
  EXPECT_EQ(JsonLine().add("x", values).text(), R"({"x":[1e-05,"nan","inf","-inf"]})");
  EXPECT_EQ(JsonLine().add("x", std::vector<double>{}).text(), R"({"x":[]})");
}

TEST(JsonLine, TextThatIsNoUtf8StaysReadable) {
  EXPECT_EQ(JsonLine().add("x", "a\xff").text(), "{\"x\":\"a\xef\xbf\xbd\"}");
}

TEST(JsonLine, AppendedToAnyOther) {
  const JsonLine empty, a = JsonLine().add("a", 1), b = JsonLine().add("b", 2);
  EXPECT_EQ(JsonLine(a).append(b).text(), R"({"a":1,"b":2})");
  EXPECT_EQ(JsonLine(a).append(empty).text(), a.text());
  EXPECT_EQ(JsonLine().append(a).text(), a.text());
}

}  // namespace
}  // namespace moiety
