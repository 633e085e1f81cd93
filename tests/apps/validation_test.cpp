// Validation during training: files, the best checkpoints, and runs that end in doubt.
#include <filesystem>
#include <set>

#include "apps/moiety/config/checkpoints.h"
#include "moiety/base/parallel.h"
#include "moiety/checkpoint/retention.h"
#include "moiety/train/inference_model.h"
#include "tests/apps/train_helpers.h"

namespace moiety::app {
namespace {

namespace fs = std::filesystem;

std::set<int64_t> saved_steps(const std::string& directory) {
  std::set<int64_t> steps;
  if (!fs::is_directory(directory + "/checkpoints")) return steps;
  for (const auto& entry : fs::directory_iterator(directory + "/checkpoints")) {
    if (const auto step = checkpoint::step_of(entry.path().filename().string())) {
      steps.insert(*step);
    }
  }
  return steps;
}

TEST(Validation, EachFileIsReportedByItselfAndInTheMean) {
  const TemporaryDirectory dir;
  const std::string a = write_tokens(dir / "first.tok", {ramp(200)}),
                    b = write_tokens(dir / "second.tok", {ramp(90, 100)});
  const Arguments files{"--data.valid=['" + a + "','" + b + "']", "--eval.every=3",
                        "--eval.samples=7"};
  for (const int ranks : {1, 2}) {
    const std::string name = dir / text("r{}", ranks);
    ASSERT_EQ(run(tiny(name, ranks, ranks) + files).code, kExitDone);
    ASSERT_EQ(events(name, "eval").size(), 3u);
    for (const nlohmann::json& e : events(name, "eval")) {
      const nlohmann::json &first = e["files"][a], &second = e["files"][b];
      EXPECT_EQ(first["tokens"], 7 * 16);
      EXPECT_EQ(second["tokens"], 5 * 16);
      const double mean = (7 * first["loss"].get<double>() + 5 * second["loss"].get<double>()) / 12;
      EXPECT_NEAR(e["loss"].get<double>(), mean, 1e-12);
      EXPECT_NE(first["loss"], second["loss"]);
    }
    const std::string svg = read_all(name + "/plots/loss.svg");
    EXPECT_NE(svg.find(">first<"), std::string::npos);
    EXPECT_NE(svg.find(">second<"), std::string::npos);
    std::string tb;
    for (const auto& file : fs::directory_iterator(name + "/tb")) tb += read_all(file.path());
    EXPECT_NE(tb.find("loss/validation/" + a), std::string::npos);
  }
  const auto one = events(dir / "r1", "eval"), two = events(dir / "r2", "eval");
  for (const std::string& file : {a, b}) {
    const double expected = one.back()["files"][file]["loss"];
    EXPECT_NEAR(two.back()["files"][file]["loss"].get<double>(), expected, 1e-4 * expected);
  }
}

TEST(Validation, TheBestCheckpointsAreKept) {
  const TemporaryDirectory dir;
  const std::string valid = write_tokens(dir / "v.tok", {ramp(400)});
  // A rate at which the loss goes up and down.
  ASSERT_EQ(run(tiny(dir / "r") + Arguments{"--data.valid=" + valid, "--checkpoint.interval=1",
                                            "--checkpoint.keep_last=1", "--checkpoint.keep_best=2",
                                            "--train.steps=12", "--optim.lr=0.3"})
                .code,
            kExitDone);
  std::vector<std::pair<double, int64_t>> losses;
  for (const nlohmann::json& e : events(dir / "r", "eval")) {
    losses.emplace_back(e["loss"].get<double>(), e["step"].get<int64_t>());
  }
  ASSERT_EQ(losses.size(), 12u);
  std::sort(losses.begin(), losses.end());
  EXPECT_EQ(saved_steps(dir / "r"), (std::set<int64_t>{losses[0].second, losses[1].second, 12}));
  const ProgramResult best =
      run({"eval", dir / "r/checkpoints/best", "--data", valid, "--samples", "64"});
  ASSERT_EQ(best.code, kExitDone) << best.err;
  const nlohmann::json line = nlohmann::json::parse(best.out);
  EXPECT_EQ(line["step"], losses[0].second);
  EXPECT_NEAR(line["loss"].get<double>(), losses[0].first, 1e-6);

  const ProgramResult none = run(tiny(dir / "s") + Arguments{"--checkpoint.keep_best=2"});
  EXPECT_EQ(none.code, kExitUsage);
  EXPECT_NE(none.last_line().find("data.valid is missing"), std::string::npos);
}

TEST(Validation, StepsThatAreMadeAgainAndResumesAreNoBorders) {
  const TemporaryDirectory dir;
  const std::string valid = write_tokens(dir / "v.tok", {ramp(400)});
  const Arguments skewed{"--router.aux=none",       "--moe.experts=8", "--moe.top_k=1",
                         "--data.valid=" + valid,   "--eval.every=2",  "--checkpoint.interval=2",
                         "--checkpoint.keep_last=9"};
  const ProgramResult first = run(tiny(dir / "r", 4, 4) + skewed + Arguments{"--train.steps=4"});
  ASSERT_NE(first.err.find(" is made again"), std::string::npos) << first.err;
  run(tiny(dir / "r", 4, 4) + skewed + Arguments{"--train.steps=8"});
  EXPECT_EQ(saved_steps(dir / "r"), (std::set<int64_t>{2, 4, 6, 8}));
  std::vector<int64_t> evaluated, saved;
  for (const nlohmann::json& e : events(dir / "r", "eval")) evaluated.push_back(e["step"]);
  EXPECT_EQ(evaluated, (std::vector<int64_t>{0, 2, 4, 6, 8}));
  EXPECT_EQ(events(dir / "r", "checkpoint").size(), 4u);
}

TEST(Validation, ARunThatEndsInDoubtEndsWithSixAndKeepsGoodCheckpoints) {
  const TemporaryDirectory dir;
  const std::string valid = write_tokens(dir / "v.tok", {ramp(400)});
  const Arguments keep{"--checkpoint.interval=1", "--checkpoint.keep_last=1",
                       "--data.valid=" + valid, "--guard.max_skips=99"};
  ASSERT_EQ(run(tiny(dir / "r") + keep + Arguments{"--train.steps=2"}).code, kExitDone);
  const auto good = digests(checkpoint_path(dir / "r", 2));
  for (const char* why : {"--optim.lr=1e300", "--optim.weight_decay=1e300"}) {
    const ProgramResult bad = run(tiny(dir / "r") + keep + Arguments{"--train.steps=5", why});
    EXPECT_EQ(bad.code, kExitNumerical) << bad.err;
    EXPECT_NE(bad.last_line().find("the run ends in doubt: the last 2 steps were skipped"),
              std::string::npos)
        << bad.err;
    EXPECT_EQ(saved_steps(dir / "r"), (std::set<int64_t>{2}));
    EXPECT_EQ(digests(checkpoint_path(dir / "r", 2)), good);
  }
  // Without a step behind the update that did it.
  const ProgramResult last =
      run(tiny(dir / "s") + Arguments{"--train.steps=1", "--optim.lr=1e300"});
  EXPECT_EQ(last.code, kExitNumerical) << last.err;
  EXPECT_TRUE(saved_steps(dir / "s").empty());
}

// Rewrites a checkpoint's configuration, with all that guards it.
void set_config(const std::string& path, const std::string& from, const std::string& to) {
  checkpoint::Manifest manifest = checkpoint::read_manifest(path);
  std::string& config = manifest.run.config;
  const size_t at = config.find(from);
  ASSERT_NE(at, std::string::npos);
  config.replace(at, from.size(), to);
  const std::string json = checkpoint::encode_manifest(manifest);
  std::ofstream(path + "/manifest.json") << json;
  std::ofstream(path + "/COMMIT") << checkpoint::encode_commit(manifest, json);
}

TEST(Validation, EvaluationHasTheThreadsOfARankOfTheRun) {
  CheckpointInfo checkpoint;
  EXPECT_EQ(inference_threads(checkpoint, {}), 0);
  checkpoint.options.run.threads = 1;
  EXPECT_EQ(inference_threads(checkpoint, {}), 1);
  EXPECT_EQ(inference_threads(checkpoint, 0), 0);
  EXPECT_EQ(inference_threads(checkpoint, 3), 3);
  checkpoint.options.run.threads = 1024;  // the run was on another machine
  EXPECT_EQ(inference_threads(checkpoint, {}), core_count());
  const int otherwise = thread_budget();
  for (const int64_t threads : {0, 1, 3}) {
    train::run_alone(threads, [&](comm::Communicator&) {
      EXPECT_EQ(thread_budget(), threads > 0 ? threads : otherwise);
    });
  }
}

TEST(Validation, AHostileConfigurationOfACheckpointIsRefusedByItsName) {
  const TemporaryDirectory dir;
  const std::string valid = write_tokens(dir / "v.tok", {ramp(400)});
  ASSERT_EQ(run(tiny(dir / "r")).code, kExitDone);
  const std::string path = checkpoint_path(dir / "r", 6);
  set_config(path, "vocab = 0", "vocab = 16777216");
  const ProgramResult wide = run({"eval", path, "--data", valid});
  EXPECT_EQ(wide.code, kExitCheckpoint);
  EXPECT_NE(wide.last_line().find(path + ": embed.weight is"), std::string::npos) << wide.err;
  set_config(path, "vocab = 16777216", "vocab = 0");
  set_config(path, "top_k = 2", "top_k = 9");
  for (const Arguments& command : {Arguments{"eval", path, "--data", valid}, {"generate", path}}) {
    const ProgramResult many = run(command);
    EXPECT_EQ(many.code, kExitCheckpoint) << many.err;
    EXPECT_NE(many.last_line().find(path), std::string::npos) << many.err;
  }
}

}  // namespace
}  // namespace moiety::app
