// Reading metrics.jsonl, axes, curves, and the pictures made of them.
#include <chrono>
#include <cmath>
#include <limits>
#include <random>

#include "apps/moiety/report/axis.h"
#include "apps/moiety/report/chart.h"
#include "apps/moiety/report/json_fields.h"
#include "apps/moiety/report/run_history.h"
#include "apps/moiety/report/run_plots.h"
#include "tests/apps/train_helpers.h"
#include "tests/apps/xml_reader.h"

namespace moiety::app {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::string step_line_of(int64_t step, const std::string& loss, double time = 0) {
  return text("{{\"v\":1,\"t\":{},\"step\":{},\"tokens\":{},\"loss\":{},\"bal\":[1,1.5]}}", time,
              step, 100 * step, loss);
}

std::string event_line(const char* event, int64_t step, double time, const char* more = "") {
  return text("{{\"v\":1,\"t\":{},\"event\":\"{}\",\"step\":{}{}}}", time, event, step, more);
}

RunHistory history_of(const std::vector<std::string>& lines) {
  RunHistory history;
  for (const std::string& line : lines) add_record(line, history);
  return history;
}

std::vector<int64_t> steps_of(const RunHistory& history) {
  std::vector<int64_t> steps;
  for (const StepPoint& p : history.steps()) steps.push_back(p.step);
  return steps;
}

TEST(JsonFields, WalksOverAnObject) {
  JsonFields fields(R"( {"a" : 1.5, "b\"":"x,}\"" ,"c":[1,{"d":"]"}], "e":{} } )");
  std::vector<std::pair<std::string, std::string>> seen;
  while (fields.next()) seen.emplace_back(fields.key(), fields.value());
  EXPECT_TRUE(fields.complete());
  const std::vector<std::pair<std::string, std::string>> expected{
      {"a", "1.5"}, {"b\\\"", R"("x,}\"")"}, {"c", R"([1,{"d":"]"}])"}, {"e", "{}"}};
  EXPECT_EQ(seen, expected);
}

TEST(JsonFields, WhatIsNoObjectIsIncomplete) {
  for (const char* bad :
       {"", "{", "[]", "{\"a\"", "{\"a\":", "{\"a\":1", "{\"a\":\"x", "{\"a\":[1}", "{\"a\":1}x",
        "{\"a\":1,}", "{,}", "{\"a\":}", "{\"a\" 1}", "nonsense"}) {
    JsonFields fields(bad);
    while (fields.next()) {
    }
    EXPECT_FALSE(fields.complete()) << bad;
  }
  JsonFields empty("{}");
  EXPECT_FALSE(empty.next());
  EXPECT_TRUE(empty.complete());
}

TEST(JsonFields, Numbers) {
  EXPECT_EQ(json_number("-1.25e3"), -1250);
  EXPECT_EQ(json_number("\"inf\""), INFINITY);
  EXPECT_EQ(json_number("\"-inf\""), -INFINITY);
  for (const char* bad : {"\"nan\"", "", "1x", "true", "\"1\""}) {
    EXPECT_TRUE(std::isnan(json_number(bad))) << bad;
  }
}

TEST(RunHistory, ResumeDropsWhatCameLater) {
  const RunHistory h =
      history_of({event_line("start", 0, 100), step_line_of(1, "5", 110), step_line_of(2, "4", 120),
                  step_line_of(3, "3", 130), event_line("eval", 3, 131, ",\"loss\":2.5"),
                  event_line("resume", 1, 1000), step_line_of(2, "4.5", 1010),
                  event_line("eval", 2, 1011, ",\"loss\":4.25")});
  EXPECT_EQ(steps_of(h), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(h.steps()[1].of(Metric::kLoss), 4.5f);
  ASSERT_EQ(h.evaluations().size(), 1u);
  EXPECT_EQ(h.evaluations()[0].loss, 4.25);
  EXPECT_EQ(h.evaluations()[0].tokens, 200);
  // The pause takes no time: 10 s to step 1, 10 s more to step 2.
  EXPECT_EQ(h.steps()[1].time, 20);
}

TEST(RunHistory, AStartWithoutCheckpointDropsAll) {
  const RunHistory h = history_of({event_line("start", 0, 0), step_line_of(1, "5", 1),
                                   event_line("start", 0, 5), step_line_of(1, "6", 7)});
  EXPECT_EQ(steps_of(h), (std::vector<int64_t>{1}));
  EXPECT_EQ(h.steps()[0].of(Metric::kLoss), 6.0f);
}

TEST(RunHistory, LinesThatAreCutAreLeftOut) {
  RunHistory h;
  EXPECT_FALSE(add_record("{\"v\":1,\"t\":5,\"step\":7,\"lo", h));
  EXPECT_FALSE(add_record("", h));
  EXPECT_FALSE(add_record("{\"v\":1,\"t\":5}", h));
  EXPECT_TRUE(h.steps().empty());
  EXPECT_TRUE(add_record(step_line_of(1, "\"nan\""), h));
  EXPECT_TRUE(std::isnan(h.steps()[0].of(Metric::kLoss)));
  EXPECT_EQ(h.steps()[0].of(Metric::kBalanceMean), 1.25f);
  EXPECT_EQ(h.steps()[0].of(Metric::kBalanceWorst), 1.5f);
  EXPECT_EQ(h.steps()[0].of(Metric::kComm), kAbsent);
}

std::vector<std::string> labels(const Axis& axis, int wanted) {
  std::vector<std::string> out;
  for (const Tick& tick : axis.ticks(wanted)) out.push_back(tick.label);
  return out;
}

TEST(Axis, TicksStandAtOneTwoFive) {
  using L = std::vector<std::string>;
  EXPECT_EQ(labels(Axis({0, 10}, 0, 1, false), 5), (L{"0", "2", "4", "6", "8", "10"}));
  EXPECT_EQ(labels(Axis({1.55, 5.7}, 0, 1, false), 6), (L{"2", "3", "4", "5"}));
  EXPECT_EQ(labels(Axis({0, 41000}, 0, 1, false), 5), (L{"0", "10k", "20k", "30k", "40k"}));
  EXPECT_EQ(labels(Axis({0, 2.5e6}, 0, 1, false), 5),
            (L{"0", "0.5M", "1.0M", "1.5M", "2.0M", "2.5M"}));
  EXPECT_EQ(labels(Axis({0, 3e-4}, 0, 1, false), 3), (L{"0", "1e-4", "2e-4", "3e-4"}));
  EXPECT_EQ(labels(Axis({-1, 1}, 0, 1, false), 4), (L{"-1.0", "-0.5", "0", "0.5", "1.0"}));
  EXPECT_EQ(labels(Axis({1, 1000}, 0, 1, true), 8),
            (L{"1", "2", "5", "10", "20", "50", "100", "200", "500", "1000"}));
  EXPECT_EQ(labels(Axis({1e-3, 1e9}, 0, 1, true), 6), (L{"0.01", "1", "100", "10k", "1M", "100M"}));
}

TEST(Axis, RangesWithoutWidthAreWidened) {
  for (const double x : {0.0, 1.0, -3.5, 1e300, 1e-300}) {
    const Axis axis({x, x}, 0, 100, false);
    EXPECT_NEAR(axis.position(x), x == 0 ? 0 : 50, 1e-6) << x;  // nothing lies below zero
    EXPECT_GE(axis.ticks(5).size(), 2u) << x;
  }
}

TEST(Curve, SmoothKeepsConstantsAndGaps) {
  std::vector<ChartPoint> points;
  for (int i = 0; i < 500; ++i) points.push_back({double(i), i == 100 ? kNan : 3.0});
  const std::vector<ChartPoint> out = smooth(points, 50);
  for (int i = 0; i < 500; ++i) {
    if (i != 100) {
      EXPECT_NEAR(out[i].y, 3, 1e-12);
    }
  }
  EXPECT_TRUE(std::isnan(out[100].y));
  // A line stays a line far from the ends: no lag.
  for (int i = 0; i < 500; ++i) points[i].y = 2.0 * i;
  EXPECT_NEAR(smooth(points, 20)[250].y, 500, 0.05);
}

TEST(Curve, ThinningKeepsSpikesAndTheirOrder) {
  std::vector<ChartPoint> points;
  for (int i = 0; i < 100000; ++i) points.push_back({double(i), std::sin(i * 1e-3)});
  points[54321].y = 99;
  points[54322].y = -99;
  points[70000].y = kNan;
  const std::vector<ChartPoint> out = thin_out(points, 800);
  EXPECT_LE(out.size(), 1700u);
  double high = 0, low = 0, last = -1;
  for (const ChartPoint& p : out) {
    EXPECT_GE(p.x, last);
    last = p.x;
    high = std::max(high, p.y);
    low = std::min(low, p.y);
  }
  EXPECT_EQ(high, 99);
  EXPECT_EQ(low, -99);
  EXPECT_EQ(thin_out({{0, 1}, {1, kNan}}, 800).size(), 2u);
}

Chart chart_of(const RunHistory& history, const std::string& which = "loss",
               const PlotOptions& options = {}) {
  const PlotRun run{"a <run> & \"more\"", &history};
  return run_chart(which, {&run, 1}, options);
}

void expect_finite(const XmlElement& element) {
  for (const char* name : {"d", "x", "y", "cx", "cy"}) {
    const auto found = element.attributes.find(name);
    if (found == element.attributes.end()) continue;
    EXPECT_EQ(found->second.find_first_not_of("0123456789.-MLmhv "), std::string::npos)
        << found->second;
  }
  for (const XmlElement& child : element.children) expect_finite(child);
}

TEST(Plot, EveryPictureIsXml) {
  const RunHistory none = history_of({event_line("start", 0, 0)});
  const RunHistory one = history_of({step_line_of(1, "5")});
  const RunHistory lost = history_of({step_line_of(1, "\"nan\""), step_line_of(2, "\"inf\""),
                                      step_line_of(3, "\"-inf\""), step_line_of(4, "-1")});
  std::vector<std::string> lines;
  for (int i = 1; i < 3000; ++i) lines.push_back(step_line_of(i, text("{}", 5.0 / i), i));
  lines.push_back(event_line("eval", 2999, 3000, ",\"loss\":0.5"));
  const RunHistory many = history_of(lines);
  for (const RunHistory* h : {&none, &one, &lost, &many}) {
    for (const std::string& which : plot_names()) {
      for (const PlotX x : {PlotX::kSteps, PlotX::kTokens, PlotX::kTime}) {
        for (const bool logarithmic : {false, true}) {
          const std::string svg = draw(chart_of(*h, which, {x, logarithmic}));
          const XmlElement root = read_xml(svg);
          EXPECT_EQ(root.name, "svg");
          EXPECT_EQ(root.attributes.at("viewBox"), "0 0 960 540");
          expect_finite(root);
          EXPECT_LT(svg.size(), 120000u);
        }
      }
    }
  }
}

TEST(Plot, TheRunsCurvesPointsAndNamesAreInThePicture) {
  std::vector<std::string> lines;
  for (int i = 1; i <= 200; ++i) lines.push_back(step_line_of(i, text("{}", 5.0 / i), i));
  lines.push_back(event_line("eval", 100, 100, ",\"loss\":1.25"));
  lines.push_back(event_line("eval", 200, 200, ",\"loss\":0.5"));
  const RunHistory history = history_of(lines);
  const XmlElement svg = read_xml(draw(chart_of(history)));
  EXPECT_EQ(svg.count("circle"), 1 + 2);  // one of the legend
  EXPECT_TRUE(svg.has_text("a <run> & \"more\""));
  EXPECT_TRUE(svg.has_text("validation"));
  EXPECT_TRUE(svg.has_text("cross-entropy (nats per token)"));
  EXPECT_TRUE(svg.has_text("steps"));
  EXPECT_FALSE(svg.has_text("nan or inf"));
  const PlotRun runs[] = {{"first", &history}, {"second", &history}};
  const XmlElement both = read_xml(draw(run_chart("loss", runs, {})));
  EXPECT_TRUE(both.has_text("first"));
  EXPECT_TRUE(both.has_text("second"));
}

TEST(Plot, EveryRunHasItsLastValueWritten) {
  const RunHistory shorter = history_of({step_line_of(1, "7"), step_line_of(2, "6")});
  const RunHistory longer =
      history_of({step_line_of(1, "5"), step_line_of(2, "4"), step_line_of(3, "3")});
  const PlotRun runs[] = {{"first", &shorter}, {"second", &longer}};
  const XmlElement svg = read_xml(draw(run_chart("loss", runs, {})));
  EXPECT_TRUE(svg.has_text("6.000"));
  EXPECT_TRUE(svg.has_text("3.000"));
}

TEST(Plot, NamesOfAnyBytesBecomeText) {
  const RunHistory history = history_of({step_line_of(1, "5")});
  std::string umlauts;
  for (int i = 0; i < 60; ++i) umlauts += "\u00e4";
  for (const std::string& path : {std::string("x/\xff\xfe&<run>"), "x/" + umlauts}) {
    const std::string name = run_name(path);
    const PlotRun runs[] = {{name, &history}, {"other", &history}};
    const std::string svg = draw(run_chart("loss", runs, {}));
    EXPECT_NO_THROW(nlohmann::json(svg).dump()) << path;  // throws for what is not UTF-8
    EXPECT_EQ(read_xml(svg).name, "svg");
  }
  EXPECT_EQ(run_name("a/b/"), "b");
  EXPECT_EQ(run_name("a/b/metrics.jsonl"), "b");
  EXPECT_EQ(run_name("a/b", true), "a/b");
  EXPECT_FALSE(run_name(".").empty());
}

TEST(Plot, AMillionStepsTakeSeconds) {
  const TemporaryDirectory dir;
  {
    std::string all;
    for (int i = 1; i <= 200000; ++i) all += step_line_of(i, "3.25", i) + "\n";
    dir.write("metrics.jsonl", all);
  }
  const auto start = std::chrono::steady_clock::now();
  const RunHistory history = read_history(dir / ".");
  ASSERT_EQ(history.steps().size(), 200000u);
  draw(chart_of(history));
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  EXPECT_LT(took.count(), 3);  // a fifth of it; about 0.1 s where nothing else runs
}

TEST(Plot, TheCommandWritesOnePictureOfSeveralRuns) {
  const TemporaryDirectory dir;
  for (const char* name : {"a", "b", "x/b"}) {
    std::filesystem::create_directories(dir / name);
    dir.write(std::string(name) + "/metrics.jsonl", step_line_of(1, "5") + "\n{\"v\":1,\"t");
  }
  const std::string out = dir / "x.svg";
  ASSERT_EQ(run({"plot", dir / "a", dir / "b/", dir / "x/b/metrics.jsonl", "--out", out}).code, 0);
  const XmlElement svg = read_xml(read_all(out));
  EXPECT_TRUE(svg.has_text("a"));
  EXPECT_FALSE(svg.has_text("b"));  // there are two of them: they go by their paths
  const ProgramResult to_stdout =
      run({"plot", dir / "a", "--which=throughput", "--x=time", "--log-y", "--out=-"});
  EXPECT_EQ(to_stdout.code, 0);
  EXPECT_EQ(read_xml(to_stdout.out).name, "svg");
  EXPECT_EQ(run({"plot", dir / "nowhere", "--out=-"}).code, kExitData);
  EXPECT_EQ(run({"plot", dir / "a"}).code, kExitUsage);
  EXPECT_EQ(run({"plot", dir / "a", "--which=nonsense", "--out=-"}).code, kExitUsage);
  EXPECT_EQ(run({"plot", dir / "a", "--out", dir / "none/x.svg"}).code, kExitDisk);
  for (const std::string& none : {std::string(), std::string("garbage\n"), std::string("{\"v\"")}) {
    const ProgramResult empty = run({"plot", dir.write("none.jsonl", none), "--out=-"});
    EXPECT_EQ(empty.code, kExitData);
    EXPECT_EQ(empty.last_line(), "moiety: " + (dir / "none.jsonl") + ": holds no steps");
    EXPECT_EQ(empty.out, "");
  }
  const std::string mixed =
      dir.write("mixed.jsonl", "x\n" + step_line_of(1, "5") + "\n{\"v\":1,\"t");
  const ProgramResult some = run({"plot", mixed, "--out=-"});
  EXPECT_EQ(some.code, kExitDone);
  EXPECT_EQ(some.err, "warning: " + mixed + ": 1 of its lines are no records and were left out\n");
}

TEST(Plot, ARunDrawsItsOwnPictures) {
  const TemporaryDirectory dir;
  ASSERT_EQ(run(tiny(dir / "r") + Arguments{"--log.plot_every=2"}).code, kExitDone);
  for (const char* name : {"loss", "throughput", "balance"}) {
    const XmlElement svg = read_xml(read_all(dir / text("r/plots/{}.svg", name)));
    EXPECT_GE(svg.count("path"), 5) << name;
    EXPECT_TRUE(svg.has_text("r"));
  }
  for (const auto& file : std::filesystem::directory_iterator(dir / "r/plots")) {
    EXPECT_EQ(file.path().extension(), ".svg");
  }
  const nlohmann::json env = nlohmann::json::parse(read_all(dir / "r/env.json"));
  EXPECT_TRUE(env["ok"].get<bool>());
}

}  // namespace
}  // namespace moiety::app
