// A run that goes back, goes on, goes back again, is started again, evaluated and plotted.
#include <filesystem>

#include "apps/moiety/report/run_history.h"
#include "tests/apps/train_helpers.h"

namespace moiety::app {
namespace {

namespace fs = std::filesystem;

class Branches : public ::testing::Test {
 protected:
  void SetUp() override { write_tokens(valid_, {ramp(300)}); }

  // The rate does not depend on the length of the run.
  ProgramResult start(const std::string& name, const Arguments& more) {
    const ProgramResult result =
        run(tiny(dir_ / name) +
            Arguments{"--optim.schedule=constant", "--checkpoint.interval=2",
                      "--checkpoint.keep_last=9", "--data.valid=" + valid_} +
            more);
    EXPECT_EQ(result.code, kExitDone) << result.err;
    return result;
  }
  Arguments back_to(const std::string& checkpoint) const {
    return {"--run.resume=" + (dir_ / "r/checkpoints/" + checkpoint)};
  }

  // The step of the checkpoint that `eval` takes, whose loss must be the one that the run had.
  int64_t evaluated(const std::string& name) {
    const ProgramResult result = run({"eval", dir_ / name, "--data", valid_, "--samples", "64"});
    EXPECT_EQ(result.code, kExitDone) << result.err;
    const nlohmann::json line = nlohmann::json::parse(result.out);
    const nlohmann::json last = events(dir_ / name, "eval").back();
    EXPECT_EQ(line["step"], last["step"]);
    EXPECT_NEAR(line["loss"].get<double>(), last["loss"].get<double>(), 1e-6);
    return line["step"];
  }
  // The losses by step that `plot` draws.
  std::map<int64_t, float> plotted(const std::string& name) {
    const ProgramResult result = run({"plot", dir_ / name, "--out", dir_ / "p.svg"});
    EXPECT_EQ(result.code, kExitDone) << result.err;
    std::map<int64_t, float> losses;
    const RunHistory history = read_history(dir_ / name);
    for (const StepPoint& p : history.steps()) losses[p.step] = p.of(Metric::kLoss);
    return losses;
  }
  static bool said(const ProgramResult& result, const std::string& words) {
    return result.err.find(words) != std::string::npos;
  }

  const TemporaryDirectory dir_;
  const std::string valid_ = dir_ / "valid.tok";
};

TEST_F(Branches, ARunFollowsItsLastStart) {
  start("whole", {"--train.steps=10"});
  start("r", {"--train.steps=8"});
  const auto first = plotted("r");

  // Back to step 4 with another rate. The same command again, for longer, goes on from there, and
  // so does a start without run.resume.
  const Arguments slower = back_to("step-00000004") + Arguments{"--optim.lr=0.002"};
  EXPECT_TRUE(said(start("r", slower + Arguments{"--train.steps=7"}),
                   "branch 2 begins behind step 4 of branch 1"));
  EXPECT_EQ(evaluated("r"), 7);
  auto second = plotted("r");
  EXPECT_EQ(second.size(), 7u);
  EXPECT_EQ(second.at(4), first.at(4));
  EXPECT_EQ(second.at(5), first.at(5));  // before the update of its step
  EXPECT_NE(second.at(6), first.at(6));
  EXPECT_TRUE(said(start("r", slower + Arguments{"--train.steps=9"}), "step-00000007"));
  EXPECT_TRUE(said(start("r", {"--optim.lr=0.002", "--train.steps=10"}), "step-00000009"));
  EXPECT_EQ(evaluated("r"), 10);
  EXPECT_EQ(events(dir_ / "r", "resume").back()["branch"], 2);

  // Back to step 4 once more: another rate is another branch.
  const Arguments slowest = back_to("step-00000004") + Arguments{"--optim.lr=0.001"};
  EXPECT_TRUE(said(start("r", slowest + Arguments{"--train.steps=6"}), "branch 3 begins"));
  EXPECT_EQ(evaluated("r"), 6);
  EXPECT_EQ(plotted("r").size(), 6u);
  EXPECT_TRUE(fs::exists(dir_ / "r/checkpoints/branch-2/step-00000010/COMMIT"));

  // Where each of them began.
  const nlohmann::json told = nlohmann::json::parse(run({"info", dir_ / "r", "--json"}).out);
  const nlohmann::json& branches = told["branches"];
  ASSERT_EQ(branches.size(), 3u);
  for (size_t b = 0; b < 3; ++b) {
    EXPECT_EQ(branches[b]["branch"], b + 1);
    EXPECT_EQ(branches[b]["parent"], b == 0 ? 0 : 1);
    EXPECT_EQ(branches[b]["step"], b == 0 ? 0 : 4);
    EXPECT_EQ(branches[b]["current"], b == 2);
  }
  const std::string words = run({"info", dir_ / "r"}).out;
  EXPECT_NE(words.find("begins before the first step; left aside: step-00000006"),
            std::string::npos)
      << words;
  EXPECT_NE(words.find("begins behind step 4 of branch 1; the current one"), std::string::npos)
      << words;

  // Back to the abandoned end of branch 1, which goes on as if nothing had been.
  EXPECT_TRUE(said(start("r", back_to("branch-1/step-00000008") + Arguments{"--train.steps=10"}),
                   "branch 4 begins behind step 8 of branch 1"));
  EXPECT_EQ(evaluated("r"), 10);
  EXPECT_EQ(plotted("r"), plotted("whole"));
  EXPECT_EQ(digests(checkpoint_path(dir_ / "r", 10)), digests(checkpoint_path(dir_ / "whole", 10)));
  EXPECT_TRUE(fs::exists(dir_ / "r/checkpoints/branch-3/step-00000006/COMMIT"));
}

TEST_F(Branches, TheSameCommandWorksWhenTheCheckpointIsPruned) {
  start("r", {"--train.steps=4"});
  const Arguments again = back_to("step-00000002") + Arguments{"--checkpoint.keep_last=1"};
  start("r", again + Arguments{"--train.steps=6"});
  EXPECT_FALSE(fs::exists(dir_ / "r/checkpoints/step-00000002"));
  EXPECT_TRUE(said(start("r", again + Arguments{"--train.steps=7"}), "step-00000006"));
}

TEST_F(Branches, ACheckpointOfAnotherRunBeginsABranchToo) {
  start("a", {"--train.steps=4"});
  const Arguments from_a{"--run.resume=" + (dir_ / "a")};
  start("r", from_a + Arguments{"--train.steps=6"});
  start("a", {"--train.steps=8"});  // a newer one there does not matter here
  EXPECT_TRUE(
      said(start("r", from_a + Arguments{"--train.steps=8"}), "r/checkpoints/step-00000006"));
  EXPECT_EQ(evaluated("r"), 8);
  EXPECT_EQ(plotted("r").begin()->first, 5);
}

TEST_F(Branches, ADryRunAndARefusedStartMoveNothing) {
  start("r", {"--train.steps=6"});
  start("r", back_to("step-00000002") + Arguments{"--dry-run"});
  EXPECT_EQ(run(tiny(dir_ / "r") + back_to("step-00000002") + Arguments{"--model.layers=3"}).code,
            kExitCheckpoint);
  EXPECT_TRUE(fs::exists(checkpoint_path(dir_ / "r", 6)));
  EXPECT_FALSE(fs::exists(dir_ / "r/checkpoints/branches.json"));
}

}  // namespace
}  // namespace moiety::app
