// A training through the library alone: what the observer hears, stops by a flag, and goes on with
// the same bits.
#include "moiety/train/train.h"

#include <map>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "moiety/base/error.h"
#include "moiety/base/parallel.h"
#include "moiety/checkpoint/manifest.h"
#include "moiety/comm/thread_group.h"
#include "moiety/train/checkpoints.h"
#include "tests/data/data_helpers.h"
#include "tests/support/error_of.h"
#include "tests/train/tiny_config.h"

namespace moiety::train {
namespace {

// Keeps what it hears; after step `stop_at` it asks for the end, after `save_at` for a checkpoint.
class Recorder final : public Observer {
 public:
  void step(const StepRecord& r, const StepWork& work) override {
    losses.push_back(r.loss);
    tokens = r.tokens;
    EXPECT_GT(work.seconds, 0);
    EXPECT_EQ(work.tokens, 8 * 16);
    EXPECT_EQ(r.balance.size(), 2u);
    if (r.step == save_at) requests.save = true;
    if (r.step == stop_at) requests.stop = true;
  }
  void event(std::string_view name, int64_t step, const JsonLine&) override {
    events.push_back(text("{} {}", name, step));
  }
  void say(LogLevel, const std::string& line) override { lines.push_back(line); }
  void evaluated(int64_t step, const EvaluationResult& result, double) override {
    evaluations[step] = result.loss;
  }
  void saved(int64_t step, double) override { saves.push_back(step); }

  int64_t save_at = -1, stop_at = -1, tokens = 0;
  TrainRequests requests;
  std::vector<double> losses;
  std::vector<std::string> events, lines;
  std::map<int64_t, double> evaluations;
  std::vector<int64_t> saves;
};

TrainConfig tiny(const std::string& directory, int64_t ranks = 1) {
  TrainConfig c = tiny_config(directory, ranks);
  c.parallel.ep = ranks;
  c.train.steps = 6;
  return c;
}

RunEnd run(const TrainConfig& config, Recorder& recorder) {
  TrainingPlan plan = make_plan(config);
  plan.train = data::synthetic_source("markov", config.data.seq_len, 264, config.run.seed);
  plan.valid = data::synthetic_source("markov", config.data.seq_len, 264, 77);
  plan.resume_from = resume_candidates(config);
  plan.observer = &recorder;
  plan.requests = &recorder.requests;
  RunEnd end = RunEnd::kDone;
  comm::run_thread_ranks(int(config.run.ranks), {}, [&](comm::Communicator& world) {
    set_thread_budget(1);
    const RunEnd mine = train(plan, world);
    if (world.rank() == 0) end = mine;
  });
  return end;
}

// Digests of all tensors and slots of a checkpoint, and its state and configuration.
std::map<std::string, std::string> contents(const TrainConfig& config, int64_t step) {
  const std::string path = config.checkpoints() + text("/step-{:08}", step);
  const checkpoint::Manifest manifest = checkpoint::read_manifest(path);
  std::map<std::string, std::string> all{{"state", manifest.run.state},
                                         {"config", manifest.run.config}};
  for (const auto& [name, tensor] : manifest.tensors) {
    for (const auto& [slot, entry] : tensor.slots) {
      all[slot + "/" + name] = text("{:016x}", entry.digest);
    }
  }
  return all;
}

TEST(Train, TellsItsObserverEverything) {
  const TemporaryDirectory dir;
  TrainConfig config = tiny(dir / "r");
  config.eval = {.every = 4, .samples = 8};
  config.checkpoint.interval = 3;
  Recorder heard;
  EXPECT_EQ(run(config, heard), RunEnd::kDone);
  ASSERT_EQ(heard.losses.size(), 6u);
  EXPECT_LT(heard.losses.back(), heard.losses.front());
  EXPECT_EQ(heard.tokens, 6 * 8 * 16);
  EXPECT_EQ(heard.evaluations.size(), 3u);
  EXPECT_EQ(heard.evaluations.count(0), 1u);
  EXPECT_EQ(heard.evaluations.count(4), 1u);
  EXPECT_EQ(heard.evaluations.count(6), 1u);
  EXPECT_EQ(heard.events.front(), "start 0");
  EXPECT_EQ(heard.events.back(), "stop 6");
  EXPECT_EQ(heard.saves, (std::vector<int64_t>{3, 6}));
  EXPECT_EQ(contents(config, 6).at("config"), "{}");
}

TEST(Train, NobodyNeedsToListen) {
  const TemporaryDirectory dir;
  const TrainConfig config = tiny(dir / "r");
  TrainingPlan plan = make_plan(config);
  plan.train = data::synthetic_source("markov", 16, 264, 1);
  comm::run_thread_ranks(1, {}, [&](comm::Communicator& world) { train(plan, world); });
  EXPECT_FALSE(contents(config, 6).empty());
}

void expect_bitwise_resume(int64_t ranks) {
  const TemporaryDirectory dir;
  Recorder whole, first, rest;
  const TrainConfig in_one = tiny(dir / "one", ranks);
  EXPECT_EQ(run(in_one, whole), RunEnd::kDone);

  const TrainConfig in_two = tiny(dir / "two", ranks);
  first.stop_at = 2;
  EXPECT_EQ(run(in_two, first), RunEnd::kStopped);
  const auto stopped = int64_t(first.losses.size());
  EXPECT_GE(stopped, 2);
  EXPECT_LE(stopped, 3);  // the flag is read before a step's end is known
  EXPECT_EQ(first.events.back(), text("stop {}", stopped));
  EXPECT_EQ(run(in_two, rest), RunEnd::kDone);
  EXPECT_EQ(rest.events.front(), text("resume {}", stopped));

  std::vector<double> losses = first.losses;
  losses.insert(losses.end(), rest.losses.begin(), rest.losses.end());
  EXPECT_EQ(losses, whole.losses);
  EXPECT_EQ(contents(in_two, 6), contents(in_one, 6));
}

TEST(Train, StopsByAFlagAndResumesBitwise) { expect_bitwise_resume(1); }
TEST(Train, SoDoTwoRanks) { expect_bitwise_resume(2); }

TEST(Train, SavesByAFlagAndGoesOn) {
  const TemporaryDirectory dir;
  const TrainConfig config = tiny(dir / "r");
  Recorder heard;
  heard.save_at = 2;
  EXPECT_EQ(run(config, heard), RunEnd::kDone);
  ASSERT_EQ(heard.saves.size(), 1u);  // the last one of a run holds nothing up
  EXPECT_EQ(heard.losses.size(), 6u);
  EXPECT_FALSE(heard.requests.save);
  EXPECT_EQ(resume_candidates(config).size(), 2u);
}

TEST(Train, TheCallersConfigurationIsKeptAndCompared) {
  const TemporaryDirectory dir;
  const TrainConfig config = tiny(dir / "r");
  const auto start = [&](const std::string& text, Recorder& heard) {
    TrainingPlan plan = make_plan(config);
    plan.train = data::synthetic_source("markov", 16, 264, 1);
    plan.resume_from = resume_candidates(config);
    plan.config_text = text;
    plan.compare = [&](const std::string& saved, const std::string& path) {
      if (saved == text) return std::vector<std::string>{"the same"};
      throw CheckpointError("{}: another one", std::filesystem::path(path).filename().string());
    };
    plan.observer = &heard;
    comm::run_thread_ranks(1, {}, [&](comm::Communicator& world) { train(plan, world); });
  };
  Recorder first, again, other;
  start("{\"a\":1}", first);
  EXPECT_EQ(contents(config, 6).at("config"), "{\"a\":1}");
  start("{\"a\":1}", again);
  EXPECT_EQ(again.lines.front(), "the same");
  EXPECT_EQ(error_of([&] { start("{\"a\":2}", other); }, ErrorKind::kCheckpoint)
                    .find("step-00000006: another one") == std::string::npos,
            false);
}

TEST(Train, WhatARunContinuesIsTheCallersChoice) {
  const TemporaryDirectory dir;
  TrainConfig config = tiny(dir / "r");
  config.run.resume = ResumeFrom::kMust;
  EXPECT_NE(error_of([&] { resume_candidates(config); }, ErrorKind::kCheckpoint)
                .find("holds no complete checkpoint"),
            std::string::npos);
  config.run.resume = ResumeFrom::kNewest;
  Recorder heard;
  run(config, heard);
  config.run.resume = ResumeFrom::kNever;
  EXPECT_NE(
      error_of([&] { resume_candidates(config); }, ErrorKind::kUsage).find("holds checkpoints"),
      std::string::npos);
  config.run.resume = ResumeFrom::kPath;
  config.run.checkpoint = dir / "r";
  EXPECT_EQ(resume_candidates(config).at(0), config.checkpoints() + "/step-00000006");
}

}  // namespace
}  // namespace moiety::train
