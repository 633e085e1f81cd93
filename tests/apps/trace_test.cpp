// The recorder of base, and the profile of a run as Chrome reads it.
#include "moiety/base/trace.h"

#include <set>
#include <thread>

#include "apps/moiety/config/train_options.h"
#include "moiety/train/profile.h"
#include "tests/apps/train_rank.h"

namespace moiety::app {
namespace {

using namespace train;

TEST(Trace, SpansAreEventsOfTheThreadsTrace) {
  Trace trace;
  { const TraceSpan nobody_listens(TraceLane::kCompute, "before"); }
  set_current_trace(&trace);
  {
    TraceSpan outer(TraceLane::kHost, "outer", {{"rows", 7}});
    const TraceSpan inner(TraceLane::kCompute, "inner");
    outer.add({"bytes", int64_t{1} << 40});
    for (int i = 0; i < 10; ++i) outer.add({"more", i});  // than fit
  }
  std::thread([] { const TraceSpan other(TraceLane::kCompute, "other thread"); }).join();
  set_current_trace(nullptr);
  ASSERT_EQ(trace.events.size(), 2u);
  const TraceEvent &outer = trace.events[0], &inner = trace.events[1];
  EXPECT_STREQ(outer.name, "outer");
  EXPECT_EQ(outer.lane, TraceLane::kHost);
  EXPECT_STREQ(outer.args[0].name, "rows");
  EXPECT_EQ(outer.args[1].value, 1099511627776.0);
  EXPECT_LE(outer.begin, inner.begin);
  EXPECT_LE(inner.end, outer.end);
}

TEST(Trace, WaitsAreTimedWithoutATraceAndOnce) {
  const int64_t before = waited_ns(TraceLane::kEp), dp = waited_ns(TraceLane::kDp);
  {
    const WaitSpan outer(TraceLane::kEp, "wait");
    const WaitSpan inner(TraceLane::kDp, "all_reduce");
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  EXPECT_GE(waited_ns(TraceLane::kEp) - before, 5'000'000);
  EXPECT_EQ(waited_ns(TraceLane::kDp), dp);
  std::thread([] { EXPECT_EQ(waited_ns(TraceLane::kEp), 0); }).join();
}

TEST(Profile, StepsAreParsed) {
  EXPECT_EQ(parse_profile_steps("").end, 0);
  EXPECT_EQ(parse_profile_steps("5:8").begin, 5);
  EXPECT_EQ(parse_profile_steps("5:8").end, 8);
  for (const char* bad : {"5", "5:", ":8", "8:5", "5:5", "0:3", "a:b", "5:8x", "5:8:9", "-1:2"}) {
    EXPECT_THROW(parse_profile_steps(bad), UsageError) << bad;
  }
  const TemporaryDirectory dir;
  EXPECT_EQ(run(tiny(dir / "r") + Arguments{"--profile.steps=8:5"}).code, kExitUsage);
}

struct Span {
  std::string name;
  double begin, end;
};

// The spans by pid and tid; it checks the fields that every event must have.
std::map<std::pair<int, int>, std::vector<Span>> spans_of(const nlohmann::json& trace) {
  std::map<std::pair<int, int>, std::vector<Span>> spans;
  for (const nlohmann::json& e : trace.at("traceEvents")) {
    const std::string phase = e.at("ph");
    EXPECT_TRUE(phase == "X" || phase == "C" || phase == "M") << e;
    EXPECT_TRUE(e.at("pid").is_number_integer() && e.at("args").is_object());
    if (phase == "M") continue;
    EXPECT_GE(e.at("ts").get<double>(), 0) << e;
    if (phase == "C") {
      EXPECT_GT(e["args"].at("bytes").get<double>(), 1e6);
    }
    if (phase != "X") continue;
    EXPECT_GE(e.at("dur").get<double>(), 0) << e;
    const double ts = e["ts"];
    spans[{e["pid"], e.at("tid")}].push_back({e.at("name"), ts, ts + e["dur"].get<double>()});
  }
  return spans;
}

TEST(Profile, ARunsStepsAreAChromeTrace) {
  const TemporaryDirectory dir;
  const ProgramResult result =
      run(tiny(dir / "r", 2, 2) + Arguments{"--profile.steps=2:4", "--train.micro_batch=2"});
  ASSERT_EQ(result.code, kExitDone) << result.err;
  const nlohmann::json trace = nlohmann::json::parse(read_all(dir / "r/profile/steps-2-3.json"));
  EXPECT_EQ(trace["displayTimeUnit"], "ms");
  EXPECT_EQ(trace["otherData"]["ranks"], 2);
  std::map<int, std::set<std::string>> names;
  for (const auto& [row, list] : spans_of(trace)) {
    // A span begins and ends inside the one that it stands in.
    std::vector<Span> open;
    double last = 0;
    for (const Span& span : list) {
      EXPECT_GE(span.begin, last) << span.name;
      last = span.begin;
      while (!open.empty() && open.back().end <= span.begin) open.pop_back();
      if (!open.empty()) {
        EXPECT_LE(span.end, open.back().end + 1e-3) << span.name << " in " << open.back().name;
      }
      open.push_back(span);
      names[row.first].insert(std::string(name(TraceLane(row.second))) + " " + span.name);
    }
  }
  for (const int rank : {0, 1}) {
    for (const char* expected : {"host step",
                                 "host forward",
                                 "host backward",
                                 "host optimizer",
                                 "compute gemm",
                                 "compute grouped_mlp",
                                 "compute grouped_mlp_backward_data",
                                 "compute grouped_mlp_backward_weights",
                                 "compute attention",
                                 "compute norm",
                                 "compute router_forward",
                                 "compute router_backward",
                                 "compute cross_entropy",
                                 "compute adamw",
                                 "ep prepare",
                                 "ep dispatch",
                                 "ep combine",
                                 "ep combine_backward",
                                 "ep dispatch_backward",
                                 "dp all_gather",
                                 "data wait for a batch"}) {
      EXPECT_TRUE(names[rank].contains(expected)) << "rank " << rank << ": " << expected;
    }
  }
  int steps = 0;
  bool rates = false;
  for (const nlohmann::json& e : trace["traceEvents"]) {
    steps += e["name"] == "step";
    if (e["name"] != "gemm") continue;
    const nlohmann::json& args = e["args"];
    EXPECT_EQ(args["flops"],
              2.0 * args["m"].get<double>() * args["n"].get<double>() * args["k"].get<double>());
    rates |= args.value("TFLOP/s", 0.0) > 0;
  }
  EXPECT_EQ(steps, 2 * 2);
  EXPECT_TRUE(rates);
}

TEST(Profile, AStepThatIsMadeAgainIsTracedOnce) {
  const TemporaryDirectory dir;
  const ProgramResult result =
      run(tiny(dir / "r", 4, 4) + Arguments{"--router.aux=none", "--moe.experts=8", "--moe.top_k=1",
                                            "--profile.steps=1:2", "--train.steps=2"});
  ASSERT_EQ(result.code, kExitDone) << result.err;
  ASSERT_NE(result.err.find("step 1 is made again"), std::string::npos);
  const nlohmann::json trace = nlohmann::json::parse(read_all(dir / "r/profile/steps-1-1.json"));
  int steps = 0;
  for (const nlohmann::json& e : trace["traceEvents"]) steps += e["name"] == "step";
  EXPECT_EQ(steps, 4) << "one a rank";
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir / "r/profile"), {}), 2);
}

TEST(Profile, AnEarlyEndLeavesWhatThereIs) {
  const TemporaryDirectory dir;
  ASSERT_EQ(run(tiny(dir / "r") + Arguments{"--profile.steps=5:100"}).code, kExitDone);
  const nlohmann::json trace = nlohmann::json::parse(read_all(dir / "r/profile/steps-5-6.json"));
  EXPECT_FALSE(spans_of(trace).empty());
}

// Expects that in some step ranks stood at waits of each of `axes`, and never at others; comm is
// their share.
void expect_exposed(const std::string& directory, const std::set<std::string>& axes) {
  std::set<std::string> seen;
  for (const auto& [step, r] : steps(directory)) {
    double sum = 0;
    EXPECT_EQ(r["exposed_ms"].size(), 5u);
    for (const auto& [axis, ms] : r["exposed_ms"].items()) {
      if (ms > 0) seen.insert(axis);
      sum += ms.get<double>();
    }
    const double step_ms = r["step_ms"];
    EXPECT_LE(sum, step_ms) << step;
    EXPECT_NEAR(r["comm"].get<double>(), 100 * sum / step_ms, 1e-9);
  }
  EXPECT_EQ(seen, axes) << directory;
}

TEST(Profile, ExposedCommunicationIsInTheRecords) {
  const TemporaryDirectory dir;
  train(tiny(dir / "ep", 2, 2));
  expect_exposed(dir / "ep", {"ep", "dp"});
  train(tiny(dir / "tp", 2) + Arguments{"--parallel.tp=2"});
  expect_exposed(dir / "tp", {"tp", "dp"});
  const Arguments half{"--train.micro_batch=4"};
  train(tiny(dir / "gtp", 2) + half + Arguments{"--parallel.gtp=2"});
  expect_exposed(dir / "gtp", {"gtp", "dp"});
  train(tiny(dir / "egtp", 2) + half + Arguments{"--parallel.egtp=2"});
  expect_exposed(dir / "egtp", {"egtp", "dp"});
}

// The same where memory is not mapped and weights travel by collective operations.
TEST(Profile, WaitsOfCollectiveGathersAreThoseOfTheirAxis) {
  const TrainConfig config =
      config_of(tiny("r", 2) + Arguments{"--parallel.gtp=2", "--parallel.egtp=2"});
  comm::run_thread_ranks(2, {.map_memory = false}, [&](comm::Communicator& world) {
    Rank rank(config, world);
    const PeerWaits before = PeerWaits::now();
    rank.step(0, "train");
    const PeerWaits waits = PeerWaits::now() - before;
    for (size_t a = 0; a < kWaitAxes.size(); ++a) {
      const bool gathers = kWaitAxes[a] == TraceLane::kGtp || kWaitAxes[a] == TraceLane::kEgtp;
      if (gathers) {
        EXPECT_GT(waits.ns[a], 0) << name(kWaitAxes[a]);
      }
    }
    rank.model.close();
  });
}

}  // namespace
}  // namespace moiety::app
