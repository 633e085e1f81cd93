#include "moiety/train/metrics.h"

#include <cmath>
#include <limits>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "moiety/base/json_line.h"

namespace moiety::train {
namespace {

StepRecord example() {
  StepRecord r;
  r.step = 120;
  r.steps = 1000;
  r.tokens = 983040;
  r.loss = 3.41254;
  r.aux = 4.1248;
  r.aux_of_layer = 1.0312;
  r.grad_norm = 0.8437;
  r.lr = 2.9e-4;
  r.step_s = 0.2;
  r.tokens_per_s = 41234;
  r.tflops = 312.44;
  r.mfu = 31.58;
  r.memory = 61.3 * (1 << 30);
  r.memory_total = 79.6 * (1 << 30);
  r.balance = {1.0, 1.12, 1.42};
  r.rank_balance = {1.0, 1.1, 1.05};
  r.entropy = 0.99;
  r.comm = 4.06;
  r.waits = {{1.25, 0.5, 0, 5.5, 2.62}};
  r.recipe = "bf16";
  return r;
}

TEST(Metrics, StepLine) {
  EXPECT_EQ(step_line(example(), false, 176),
            "step 120/1000 loss 3.4125 aux 1.031 gnorm 0.844 lr 2.9e-04 tok/s 41.2k "
            "TFLOP/s 312.4 MFU 31.6 mem 61.3/79.6G bal 1.18/1.42 drop 0 comm 4.1 eta 2m56s");
}

TEST(Metrics, StepLineWithoutEtaEndsBeforeIt) {
  const std::string line = step_line(example(), false, std::nullopt);
  EXPECT_EQ(line.substr(line.size() - 9), " comm 4.1");
}

TEST(Metrics, StepLineSaysWhatIsUnusual) {
  StepRecord r = example();
  r.z = 12.5;
  r.loss = std::nan("");
  r.grad_norm = INFINITY;
  r.tflops = 0.0314;
  r.skipped = r.forced = true;
  r.dropped = 17;
  EXPECT_EQ(step_line(r, true, 0),
            "step 120/1000 loss nan aux 1.031 z 12.500 gnorm inf lr 2.9e-04 tok/s 41.2k "
            "TFLOP/s 0.0314 MFU 31.6 mem 61.3/79.6G bal 1.18/1.42 drop 17 comm 4.1 eta 0s "
            "SKIPPED FORCED");
}

TEST(Metrics, JsonRecordReadsBackExactly) {
  StepRecord r = example();
  r.loss = 1.0 / 3;
  r.grad_norm = -INFINITY;
  r.z = std::nan("");
  const std::string text = step_json(r, 1700000000.123456);
  EXPECT_EQ(text.find('\n'), std::string::npos);
  const nlohmann::json json = nlohmann::json::parse(text);
  EXPECT_EQ(json["v"], 1);
  EXPECT_EQ(json["t"].get<double>(), 1700000000.123456);
  EXPECT_EQ(json["step"], 120);
  EXPECT_EQ(json["loss"].get<double>(), 1.0 / 3);
  EXPECT_EQ(json["gnorm"], "-inf");
  EXPECT_EQ(json["z"], "nan");
  EXPECT_EQ(json["bal"].get<std::vector<double>>(), r.balance);
  EXPECT_EQ(json["comm"], 4.06);
  EXPECT_EQ(json["exposed_ms"],
            (nlohmann::json{{"tp", 1.25}, {"gtp", 0.5}, {"egtp", 0}, {"ep", 5.5}, {"dp", 2.62}}));
  EXPECT_EQ(json["skipped"], false);
  EXPECT_EQ(json["recipe"], "bf16");
  EXPECT_EQ(text.rfind("{\"v\":1,\"t\":1700000000.123456,\"step\":120,", 0), 0u) << text;
}

TEST(Metrics, NumbersAreShortest) {
  EXPECT_EQ(JsonLine().add("a", 0.1).add("b", 1e300).add("c", 5e-324).add("d", 264.0).text(),
            R"({"a":0.1,"b":1e+300,"c":5e-324,"d":264})");
  EXPECT_EQ(JsonLine().add("s", "a\"\\\n").text(), R"({"s":"a\"\\\n"})");
  EXPECT_EQ(JsonLine().text(), "{}");
}

TEST(Metrics, Balance) {
  const int64_t even[] = {5, 5, 5, 5}, one[] = {8, 0, 0, 0}, none[] = {0, 0};
  EXPECT_EQ(imbalance(even, 4, 4), 1);
  EXPECT_EQ(imbalance(one, 4, 4), 4);
  EXPECT_EQ(imbalance(one, 4, 2), 2);
  EXPECT_EQ(imbalance(none, 2, 2), 1);
  EXPECT_DOUBLE_EQ(balance_entropy(even, 4), 1);
  EXPECT_EQ(balance_entropy(one, 4), 0);
}

TEST(Metrics, SiText) {
  EXPECT_EQ(si_text(0), "0.00");
  EXPECT_EQ(si_text(12.34), "12.3");
  EXPECT_EQ(si_text(999), "999");
  EXPECT_EQ(si_text(999.7), "1.00k");
  EXPECT_EQ(si_text(41234), "41.2k");
  EXPECT_EQ(si_text(1306000), "1.31M");
}

TEST(Metrics, EtaFollowsTheSteps) {
  Eta eta;
  eta.add_step(1);
  eta.add_step(3);
  EXPECT_DOUBLE_EQ(eta.seconds(10, 0, 0), 20);
  eta.add_evaluation(5);
  eta.add_checkpoint(2);
  eta.add_checkpoint(4);
  EXPECT_DOUBLE_EQ(eta.seconds(10, 2, 3), 20 + 10 + 9);
  for (int i = 0; i < 1000; ++i) eta.add_step(7);
  EXPECT_NEAR(eta.seconds(1, 0, 0), 7, 1e-6);
}

TEST(Metrics, Durations) {
  EXPECT_EQ(duration_text(0.4), "0s");
  EXPECT_EQ(duration_text(59.4), "59s");
  EXPECT_EQ(duration_text(125), "2m05s");
  EXPECT_EQ(duration_text(3720), "1h02m");
  EXPECT_EQ(duration_text(3 * 86400 + 4 * 3600), "3d04h");
}

}  // namespace
}  // namespace moiety::train
