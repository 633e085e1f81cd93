// Training under tensor parallelism, alone and with data and expert parallelism, through the
// program itself.
#include <cmath>
#include <filesystem>

#include "apps/moiety/exit_code.h"
#include "tests/apps/train_helpers.h"

namespace moiety::app {
namespace {

namespace fs = std::filesystem;

struct TpCase {
  const char* name;
  int ranks, tp, ep;
};
constexpr TpCase kTp2{"tp2", 2, 2, 1}, kTp2Dp2{"tp2.dp2", 4, 2, 1}, kTp2Ep2{"tp2.ep2", 2, 2, 2},
    kTp4{"tp4", 4, 4, 1}, kTp2Ep4{"tp2.ep4", 4, 2, 4}, kTp4Ep2{"tp4.ep2", 4, 4, 2};

// Four key heads, so that four ranks can cut them; all kinds of layers.
Arguments cut_model(const std::string& directory, const TpCase& c = {"", 1, 1, 1}) {
  return tiny(directory, c.ranks, c.ep) +
         Arguments{
             text("--parallel.tp={}", c.tp), text("--train.micro_batch={}", 8 * c.tp / c.ranks),
             "--model.kv_heads=4",           "--model.layers=3",
             "--model.dense_layers=[1]",     "--model.d_ffn_dense=48",
             "--moe.shared_d_ffn=16",        "--moe.shared_gate",
             "--router.z_coef=0.001"};
}

void losses_equal(const Arguments& more) {
  const TemporaryDirectory dir;
  const Arguments longer = Arguments{"--train.steps=20", "--checkpoint.interval=0"} + more;
  ASSERT_EQ(run(cut_model(dir / "one") + longer).code, kExitDone);
  const auto one = steps(dir / "one");
  ASSERT_EQ(one.size(), 20u);
  EXPECT_LT(one.at(20)["loss"].get<double>(), one.at(1)["loss"].get<double>() - 0.3);
  for (const TpCase& c : {kTp2, kTp2Dp2, kTp2Ep2, kTp4, kTp2Ep4, kTp4Ep2}) {
    const ProgramResult result = run(cut_model(dir / c.name, c) + longer);
    ASSERT_EQ(result.code, kExitDone) << c.name << ": " << result.err;
    expect_near(dir / c.name, dir / "one", 1e-4);
  }
}

TEST(ParallelTrain, TensorParallelRanksTrainAsOne) { losses_equal({"--router.bias_rate=0.001"}); }

TEST(ParallelTrain, TensorParallelRanksDescendAsOne) {
  losses_equal(kDescent + Arguments{"--model.tie_embeddings"});
}

TEST(ParallelTrain, InitialWeightsDoNotDependOnTp) {
  const TemporaryDirectory dir;
  const Arguments still{"--train.steps=1", "--optim.lr=0", "--optim.min_lr=0"};
  ASSERT_EQ(run(cut_model(dir / "one") + still).code, kExitDone);
  const auto one = digests(checkpoint_path(dir / "one", 1));
  for (const TpCase& c : {kTp2Dp2, kTp4Ep2}) {
    ASSERT_EQ(run(cut_model(dir / c.name, c) + still).code, kExitDone);
    const auto many = digests(checkpoint_path(dir / c.name, 1));
    ASSERT_EQ(many.size(), one.size());
    for (const auto& [name, digest] : one) {
      if (name.starts_with("weight/")) {
        EXPECT_EQ(digest, many.at(name)) << name;
      }
    }
  }
}

// The checkpoint of step 3 of `from`, continued under another layout.
void resume_under(const TemporaryDirectory& dir, const TpCase& from, const TpCase& to) {
  const Arguments keep{"--checkpoint.interval=3", "--checkpoint.keep_last=10"};
  const std::string whole = dir / from.name, part = dir / text("{}-{}", from.name, to.name);
  if (!fs::exists(whole)) {
    ASSERT_EQ(run(cut_model(whole, from) + keep).code, kExitDone);
  }
  fs::create_directories(part + "/checkpoints");
  fs::copy(checkpoint_path(whole, 3), checkpoint_path(part, 3));
  const ProgramResult result = run(cut_model(part, to) + keep);
  ASSERT_EQ(result.code, kExitDone) << result.err;
  EXPECT_NE(result.err.find("saved under another layout"), std::string::npos);
  EXPECT_EQ(steps(part).begin()->first, 4);
  expect_near(part, whole, 1e-4);
}

TEST(ParallelTrain, ResumesUnderAnotherLayout) {
  const TemporaryDirectory dir;
  const TpCase one{"one", 1, 1, 1}, dp4{"dp4", 4, 1, 1};
  resume_under(dir, kTp2Dp2, kTp4);
  resume_under(dir, kTp2Dp2, dp4);
  resume_under(dir, kTp2Dp2, one);
  resume_under(dir, dp4, kTp2Ep4);
}

TEST(ParallelTrain, ResumeUnderTheSameLayoutIsBitwise) {
  const TemporaryDirectory dir;
  const Arguments keep{"--checkpoint.interval=3", "--checkpoint.keep_last=10",
                       "--precision.recipe=bf16", "--data.shuffle=true"};
  ASSERT_EQ(run(cut_model(dir / "whole", kTp2Dp2) + keep).code, kExitDone);
  fs::create_directories(dir / "part/checkpoints");
  fs::copy(checkpoint_path(dir / "whole", 3), checkpoint_path(dir / "part", 3));
  ASSERT_EQ(run(cut_model(dir / "part", kTp2Dp2) + keep).code, kExitDone);
  EXPECT_EQ(digests(checkpoint_path(dir / "part", 6)), digests(checkpoint_path(dir / "whole", 6)));
}

// The differences are the order of sums, partial sums that travel in bf16, and maxima of
// activations that are taken over a rank's columns (nvfp4, fp8_tensor).
TEST(ParallelTrain, RecipesDifferLittle) {
  const TemporaryDirectory dir;
  const Arguments wide{
      "--model.d_model=256",      "--model.kv_heads=2",      "--model.layers=2",
      "--model.dense_layers=[0]", "--model.d_ffn_dense=256", "--moe.shared_d_ffn=256",
      "--train.steps=4",          "--optim.lr=0.002",        "--checkpoint.interval=0"};
  for (const char* name : {"bf16", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4"}) {
    const Arguments recipe = wide + Arguments{text("--precision.recipe={}", name)};
    const std::string one = dir / text("{}-one", name), two = dir / text("{}-two", name);
    ASSERT_EQ(run(cut_model(one) + recipe).code, kExitDone);
    const ProgramResult result = run(cut_model(two, kTp2Ep2) + recipe);
    ASSERT_EQ(result.code, kExitDone) << result.err;
    const auto expected = steps(one);
    for (const auto& [step, r] : steps(two)) {
      const double loss = expected.at(step)["loss"].get<double>();
      EXPECT_NEAR(r["loss"].get<double>(), loss, 0.01 * loss) << name << " step " << step;
    }
  }
}

TEST(ParallelTrain, EvaluatesUnderTp) {
  const TemporaryDirectory dir;
  const std::string valid = write_tokens(dir / "v.tok", {ramp(400)});
  const Arguments eval{"--data.valid=" + valid, "--eval.samples=5", "--train.steps=2"};
  ASSERT_EQ(run(cut_model(dir / "one") + eval).code, kExitDone);
  const auto one = events(dir / "one", "eval");
  ASSERT_EQ(one.size(), 1u);
  for (const TpCase& c : {kTp2Dp2, kTp4Ep2}) {
    ASSERT_EQ(run(cut_model(dir / c.name, c) + eval).code, kExitDone);
    const auto many = events(dir / c.name, "eval");
    ASSERT_EQ(many.size(), 1u);
    EXPECT_EQ(many[0]["tokens"], one[0]["tokens"]);
    const double loss = one[0]["loss"].get<double>();
    EXPECT_NEAR(many[0]["loss"].get<double>(), loss, 1e-4 * loss);
  }
  // One rank reads what four have saved.
  const ProgramResult again =
      run({"eval", dir / "tp4.ep2", "--data=" + valid, "--samples=5", "--run.device=cpu"});
  ASSERT_EQ(again.code, kExitDone) << again.err;
  const double loss = events(dir / "tp4.ep2", "eval")[0]["loss"].get<double>();
  EXPECT_NEAR(nlohmann::json::parse(again.out)["loss"].get<double>(), loss, 1e-4 * loss);
  EXPECT_EQ(run({"generate", dir / "tp4.ep2", "--prompt=ab", "--tokens=3"}).code, kExitDone);
}

}  // namespace
}  // namespace moiety::app
