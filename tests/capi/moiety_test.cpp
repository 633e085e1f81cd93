// The C interface: codes, texts, ownership, and that no exception leaves it.
#include "moiety/capi/moiety.h"

#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/support/files.h"

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
  EXPECT_STREQ(moiety_code_name(MOIETY_INTERRUPTED), "Interrupted");
  EXPECT_STREQ(moiety_code_name(MOIETY_INTERRUPTED + 1), "?");
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

json tensor(const std::vector<float>& x) {
  return {
      {"data", reinterpret_cast<uintptr_t>(x.data())}, {"dtype", "float32"}, {"sizes", {x.size()}}};
}

TEST(CApi, TablesOfTensorsServeSteps) {
  const std::vector<float> grad = {3, -4}, m(2), v(2), p = {1, 1};
  const json asked = {{"device", -1},
                      {"beta1", 0.0},
                      {"beta2", 0.0},
                      {"eps", 1e-8},
                      {"seed", 0},
                      {"segments",
                       {{{"grad", tensor(grad)},
                         {"master", tensor(p)},
                         {"exp_avg", tensor(m)},
                         {"exp_avg_sq", tensor(v)},
                         {"weight", nullptr}}}}};
  int64_t steps = 0, sums = 0;
  char* facts = nullptr;
  ASSERT_EQ(moiety_adamw_create(asked.dump().c_str(), &steps, &facts), MOIETY_OK)
      << moiety_last_error();
  EXPECT_EQ(taken(facts), json::object());
  // s, k1, k2, lr, wd, t, skip, unused: without memory of the past a step is the gradient's sign.
  float step[8] = {1, 1, 1, 0.25f, 0, 0, 0, 0};
  ASSERT_EQ(moiety_adamw_step(steps, step, nullptr), MOIETY_OK) << moiety_last_error();
  EXPECT_FLOAT_EQ(p[0], 0.75f);
  EXPECT_FLOAT_EQ(p[1], 1.25f);

  const json norm = {{"device", -1}, {"grads", {tensor(grad)}}};
  ASSERT_EQ(moiety_grad_statistics_create(norm.dump().c_str(), &sums, &facts), MOIETY_OK);
  std::vector<double> out(taken(facts).at("bytes").get<size_t>() / sizeof(double));
  ASSERT_EQ(moiety_grad_statistics_step(sums, out.data(), nullptr), MOIETY_OK);
  EXPECT_EQ(out[0], 25);

  // A handle is of one kind, and gone when it is released.
  EXPECT_EQ(moiety_adamw_step(sums, step, nullptr), MOIETY_INVALID_ARGUMENT);
  EXPECT_NE(std::string(moiety_last_error()).find("is no handle"), std::string::npos);
  EXPECT_EQ(moiety_release(steps), MOIETY_OK);
  EXPECT_EQ(moiety_release(steps), MOIETY_OK);
  EXPECT_EQ(moiety_adamw_step(steps, step, nullptr), MOIETY_INVALID_ARGUMENT);
  EXPECT_EQ(moiety_release(sums), MOIETY_OK);
  EXPECT_EQ(moiety_partial_cast_create("{}", &steps, &facts), MOIETY_INVALID_ARGUMENT);
  EXPECT_EQ(moiety_partial_cast_create(nullptr, &steps, &facts), MOIETY_INVALID_ARGUMENT);
}

// A request for memory of these values.
json piece(const std::string& tensor, std::vector<float>& values) {
  const auto n = static_cast<int64_t>(values.size());
  return {{"tensor", tensor}, {"slot", "weight"},
          {"shape", {n}},     {"start", {0}},
          {"size", {n}},      {"data", reinterpret_cast<uintptr_t>(values.data())}};
}

TEST(CApi, CheckpointsComeBack) {
  const moiety::TemporaryDirectory dir;
  std::vector<float> a{1, -2, 3}, b{4}, back_a(3), back_b(1);
  char* text = nullptr;
  const json run{{"step", 7}, {"tokens", 70},   {"adam_t", 6},
                 {"seed", 5}, {"config", "{}"}, {"state", "{}"}};
  const json saved{
      {"path", dir / "out"}, {"run", run}, {"pieces", json::array({piece("a", a), piece("b", b)})}};
  ASSERT_EQ(moiety_checkpoint_save(saved.dump().c_str(), &text), MOIETY_OK) << moiety_last_error();
  const std::string path = taken(text).at("path");
  EXPECT_EQ(path, (dir / "out") + "/step-00000007");
  ASSERT_EQ(moiety_checkpoint_describe(json{{"path", dir / "out"}}.dump().c_str(), &text),
            MOIETY_OK);
  const json said = taken(text);
  EXPECT_EQ(said.at("adam_t"), 6);
  EXPECT_EQ(said.at("tensors").at("a"), (json{{"shape", {3}}, {"slots", {{"weight", "float32"}}}}));
  json wanted{
      {"path", path}, {"weights_only", true}, {"pieces", json::array({piece("a", back_a)})}};
  EXPECT_EQ(moiety_checkpoint_load(wanted.dump().c_str(), nullptr), MOIETY_CHECKPOINT);
  EXPECT_NE(std::string(moiety_last_error()).find("b"), std::string::npos);
  wanted["pieces"].push_back(piece("b", back_b));
  ASSERT_EQ(moiety_checkpoint_load(wanted.dump().c_str(), nullptr), MOIETY_OK);
  EXPECT_EQ(a, back_a);
  EXPECT_EQ(b, back_b);
}

TEST(CApi, RequestsForStorageThatAreNone) {
  char* text = nullptr;
  std::vector<float> values{1, 2};
  EXPECT_EQ(moiety_checkpoint_save("{}", &text), MOIETY_INVALID_ARGUMENT);
  EXPECT_EQ(moiety_checkpoint_load(nullptr, nullptr), MOIETY_INVALID_ARGUMENT);
  EXPECT_EQ(moiety_folder_load("[]", nullptr), MOIETY_INVALID_ARGUMENT);
  EXPECT_NE(moiety_folder_describe(R"({"path": "/nowhere"})", &text), MOIETY_OK);
  json wrong{{"path", "/tmp"}, {"weights_only", true}};
  json box = piece("a", values);
  box["start"] = {0, 0};
  wrong["pieces"] = json::array({box});
  EXPECT_EQ(moiety_checkpoint_load(wrong.dump().c_str(), nullptr), MOIETY_INVALID_ARGUMENT);
  EXPECT_NE(std::string(moiety_last_error()).find("dimensions"), std::string::npos);
}

}  // namespace
