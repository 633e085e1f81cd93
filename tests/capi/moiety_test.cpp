// The C interface: codes, texts, ownership, and that no exception leaves it.
#include "moiety/capi/moiety.h"

#include <string>
#include <thread>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace {

using nlohmann::json;

// What a function writes, parsed and given back.
json taken(char* text) {
  json value = json::parse(text);
  moiety_free(text);
  return value;
}

json request(const std::string& form) {
  return {{"keys",
           {{{"name", "a.weight1"}, {"shape", {6, 4}}},
            {{"name", "a.weight0"}, {"shape", {6, 4}}},
            {{"name", "b.weight10"}, {"shape", {3}}}}},
          {"modules", {{{"name", "a"}, {"experts", 2}, {"gated", false}}}},
          {"form", form}};
}

TEST(CApi, CodesHaveNames) {
  EXPECT_STREQ(moiety_code_name(MOIETY_OK), "Ok");
  EXPECT_STREQ(moiety_code_name(MOIETY_UNSUPPORTED), "Unsupported");
  EXPECT_STREQ(moiety_code_name(MOIETY_NUMERICAL), "Numerical");
  EXPECT_STREQ(moiety_code_name(MOIETY_INTERNAL), "Internal");
  EXPECT_STREQ(moiety_code_name(MOIETY_INTERNAL + 1), "?");
  EXPECT_STREQ(moiety_code_name(-1), "?");
}

TEST(CApi, BuildInfoAndDoctorAreJson) {
  char* text = nullptr;
  ASSERT_EQ(moiety_build_info(&text), MOIETY_OK);
  const json info = taken(text);
  EXPECT_EQ(info.at("version"), moiety_version());
  EXPECT_TRUE(info.at("cuda").is_boolean());
  EXPECT_GE(info.at("threads").get<int>(), 1);
  ASSERT_EQ(moiety_doctor("/tmp", 0, &text), MOIETY_OK);
  EXPECT_FALSE(taken(text).at("checks").empty());
}

TEST(CApi, CountersOfAThreadThatHasNoGpu) {
  std::thread([] {
    int64_t allocations = -1, waits = -1;
    ASSERT_EQ(moiety_counters(&allocations, &waits), MOIETY_OK);
    EXPECT_EQ(allocations, 0);
    EXPECT_EQ(waits, 0);
  }).join();
}

TEST(CApi, RemapsKeys) {
  char* text = nullptr;
  ASSERT_EQ(moiety_key_remap(request("packed").dump().c_str(), &text), MOIETY_OK)
      << moiety_last_error();
  const json moves = taken(text).at("moves");
  ASSERT_EQ(moves.size(), 3u);
  int experts = 0;
  for (const json& move : moves) {
    if (!move.at("of_experts").get<bool>()) {
      EXPECT_EQ(move.at("source"), move.at("target"));
      EXPECT_EQ(move.at("source").at("name"), "b.weight10");
      continue;
    }
    ++experts;
    EXPECT_EQ(move.at("target").at("name"), "a.weight");
    EXPECT_EQ(move.at("target").at("shape"), (std::vector<int>{2, 6, 4}));
    EXPECT_EQ(move.at("source").at("name"),
              "a.weight" + std::to_string(move.at("expert").get<int>()));
  }
  EXPECT_EQ(experts, 2);
}

TEST(CApi, ErrorsAreCodesAndTextsOfTheThread) {
  char* text = nullptr;
  json partial = request("packed");
  partial["modules"][0]["experts"] = 3;
  EXPECT_EQ(moiety_key_remap(partial.dump().c_str(), &text), MOIETY_CHECKPOINT);
  EXPECT_NE(std::string(moiety_last_error()).find("key_remap"), std::string::npos);
  std::thread([] { EXPECT_STREQ(moiety_last_error(), ""); }).join();

  EXPECT_EQ(moiety_key_remap(request("striped").dump().c_str(), &text), MOIETY_INVALID_ARGUMENT);
  EXPECT_STREQ(moiety_last_error(), "key_remap: form is 'striped', expected packed or indexed");
  for (const char* bad : {"", "{", "[]", "{\"keys\": 3}"}) {
    EXPECT_EQ(moiety_key_remap(bad, &text), MOIETY_INVALID_ARGUMENT) << bad;
  }
  EXPECT_EQ(moiety_key_remap(nullptr, &text), MOIETY_INVALID_ARGUMENT);
  EXPECT_EQ(moiety_key_remap(request("packed").dump().c_str(), nullptr), MOIETY_INVALID_ARGUMENT);
  EXPECT_EQ(moiety_doctor(nullptr, 0, &text), MOIETY_INVALID_ARGUMENT);
  EXPECT_EQ(moiety_counters(nullptr, nullptr), MOIETY_INVALID_ARGUMENT);
  EXPECT_EQ(text, nullptr);
  moiety_free(nullptr);
}

}  // namespace
