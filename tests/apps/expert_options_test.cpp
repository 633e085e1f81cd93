// Training with the options of experts (docs/config.md#moe), through the program itself: layouts,
// recomputation, recipes, checkpoints, and the order of weights in memory.
#include <filesystem>

#include "apps/moiety/exit_code.h"
#include "tests/apps/train_helpers.h"

namespace moiety::app {
namespace {

namespace fs = std::filesystem;

// The gate of GPT-OSS with a limit that small weights reach.
const Arguments kGptOss{"--moe.activation=qgeglu", "--moe.act_alpha=1.702", "--moe.act_limit=0.02",
                        "--moe.act_offset=1", "--moe.expert_bias"};
const Arguments kSquaredRelu{"--moe.activation=relu2", "--moe.expert_bias"};
const Arguments kClamped{"--moe.activation=clamped_swiglu", "--moe.act_limit=0.02"};

struct Layout {
  const char* name;
  int ranks = 1, tp = 1, gtp = 1, ep = 1, egtp = 1;
};
constexpr Layout kOne{"one"}, kLayouts[] = {{"ep2", 2, 1, 1, 2},
                                            {"tp2.ep2", 2, 2, 1, 2},
                                            {"gtp2.egtp2", 2, 1, 2, 1, 2},
                                            {"dp2.ep2.egtp2", 4, 1, 2, 2, 2},
                                            {"tp2.dp2.egtp4", 4, 2, 1, 1, 4}};

// All kinds of layers, so that dense ones and the shared expert have the activation too.
Arguments model(const std::string& directory, const Layout& l = kOne) {
  return tiny(directory, l.ranks, l.ep) +
         Arguments{text("--parallel.tp={}", l.tp),
                   text("--parallel.gtp={}", l.gtp),
                   text("--parallel.egtp={}", l.egtp),
                   text("--train.micro_batch={}", 8 * l.tp / l.ranks),
                   "--train.steps=10",
                   "--model.kv_heads=4",
                   "--model.layers=3",
                   "--model.dense_layers=[1]",
                   "--model.d_ffn_dense=48",
                   "--moe.shared_d_ffn=16",
                   "--checkpoint.interval=5"};
}

void expect_same_losses(const std::string& run, const std::string& expected) {
  const auto all = steps(expected), got = steps(run);
  ASSERT_FALSE(got.empty());
  for (const auto& [step, r] : got) {
    for (const char* field : {"loss", "gnorm"}) {
      EXPECT_EQ(r[field], all.at(step)[field]) << field << " of step " << step << " in " << run;
    }
  }
}

TEST(ExpertOptions, LayoutsTrainAsOneRank) {
  const TemporaryDirectory dir;
  const std::pair<const char*, Arguments> kinds[] = {{"gpt_oss", kGptOss}, {"relu2", kSquaredRelu}};
  for (const auto& [kind, options] : kinds) {
    const std::string one = dir / text("{}-one", kind);
    train(model(one) + options);
    EXPECT_LT(steps(one).at(10)["loss"].get<double>(), steps(one).at(1)["loss"].get<double>());
    for (const Layout& l : kLayouts) {
      const std::string many = dir / text("{}-{}", kind, l.name);
      train(model(many, l) + options);
      expect_near(many, one, 1e-4);
    }
  }
}

TEST(ExpertOptions, RecomputationAndDelayChangeNoBit) {
  const TemporaryDirectory dir;
  train(model(dir / "kept") + kGptOss);
  const Arguments modes[] = {{"--memory.recompute=moe"},
                             {"--memory.recompute=full", "--moe.delay_wgrad"}};
  for (const Arguments& mode : modes) {
    const std::string name = dir / mode[0].substr(19);
    train(model(name) + kGptOss + mode);
    expect_same_losses(name, dir / "kept");
    EXPECT_EQ(digests(checkpoint_path(name, 10)), digests(checkpoint_path(dir / "kept", 10)));
  }
}

TEST(ExpertOptions, RecipesDifferLittle) {
  const TemporaryDirectory dir;
  for (const char* name : {"bf16", "fp8_tensor", "fp8_block", "mxfp8", "nvfp4"}) {
    train(model(dir / name) + kGptOss +
          Arguments{text("--precision.recipe={}", name), "--precision.keep_first=0",
                    "--precision.keep_last=0", "--checkpoint.interval=0"});
    expect_losses_near(dir / name, dir / "bf16", 0.03);
  }
}

// Files hold plain order, so runs go on from each other's checkpoints.
TEST(ExpertOptions, OrderInMemoryIsNotThatOfFiles) {
  const TemporaryDirectory dir;
  const Arguments indexed{"--moe.expert_weights=indexed"}, interleaved{"--moe.glu_interleave=32"};
  const std::string plain = dir / "plain";
  train(model(plain) + kGptOss);
  train(model(dir / "indexed") + kGptOss + indexed);
  expect_same_losses(dir / "indexed", plain);
  EXPECT_EQ(digests(checkpoint_path(dir / "indexed", 10)), digests(checkpoint_path(plain, 10)));
  train(model(dir / "interleaved") + kGptOss + interleaved);
  expect_same_losses(dir / "interleaved", plain);
  EXPECT_EQ(digests(checkpoint_path(dir / "interleaved", 10)), digests(checkpoint_path(plain, 10)));

  const Arguments still{"--train.steps=1", "--optim.lr=0", "--optim.min_lr=0"};
  train(model(dir / "first") + kGptOss + still);
  train(model(dir / "first.s32") + kGptOss + still + interleaved);
  const auto first = digests(checkpoint_path(dir / "first", 1)),
             other = digests(checkpoint_path(dir / "first.s32", 1));
  ASSERT_TRUE(first.contains("weight/layers.0.moe.experts.fc1.bias"));
  for (const auto& [name, digest] : first) {
    if (name.starts_with("weight/")) {
      EXPECT_EQ(other.at(name), digest) << name;
    }
  }

  for (const Layout& l : {kOne, kLayouts[3]}) {
    const std::string part = dir / text("part-{}", l.name);
    fs::create_directories(part + "/checkpoints");
    fs::copy(checkpoint_path(plain, 5), checkpoint_path(part, 5));
    train(model(part, l) + kGptOss + indexed + interleaved);
    EXPECT_EQ(steps(part).begin()->first, 6);
    expect_near(part, plain, 1e-4);
    const std::string back = dir / text("back-{}", l.name);
    fs::create_directories(back + "/checkpoints");
    fs::copy(checkpoint_path(part, 10), checkpoint_path(back, 10));
    train(model(back) + kGptOss + Arguments{"--train.steps=11"});
    EXPECT_EQ(steps(back).begin()->first, 11);
  }
}

TEST(ExpertOptions, CheckpointsKnowThem) {
  const TemporaryDirectory dir;
  const std::string path = write_tokens(dir / "a.tok", {ramp(900)});
  const std::string name = dir / "run";
  const Arguments arguments =
      model(name) + kGptOss +
      Arguments{"--moe.path=reference",    "--moe.expert_weights=indexed",
                "--moe.glu_interleave=32", "--data.synthetic=none",
                "--data.train=" + path,    "--data.valid=[\"" + path + "\"]",
                "--eval.samples=16"};
  const ProgramResult result = run(arguments);
  ASSERT_EQ(result.code, kExitDone) << result.err;
  EXPECT_NE(result.err.find("experts: reference (cpu: reference is required)"), std::string::npos)
      << result.err;
  const ProgramResult eval = run({"eval", name, "--data", path, "--samples=16"});
  ASSERT_EQ(eval.code, kExitDone) << eval.err;
  EXPECT_NEAR(nlohmann::json::parse(eval.out)["loss"].get<double>(),
              events(name, "eval").back()["loss"].get<double>(), 1e-5);
  EXPECT_EQ(run({"generate", name, "--prompt", "a", "--tokens", "4"}).code, kExitDone);
  EXPECT_EQ(run({"info", name}).code, kExitDone);
  // Another activation is another model; where its weights lie is not.
  const ProgramResult other = run(model(name) + kClamped + Arguments{"--moe.expert_bias"});
  EXPECT_EQ(other.code, kExitCheckpoint);
  EXPECT_NE(other.err.find("moe.activation was \"qgeglu\", is now \"clamped_swiglu\""),
            std::string::npos)
      << other.err;
}

TEST(ExpertOptions, APathThatIsNotThereIsAnErrorOfTheConfiguration) {
  const TemporaryDirectory dir;
  const ProgramResult result = run(model(dir / "r") + Arguments{"--moe.path=sm90"});
  EXPECT_EQ(result.code, kExitUsage);
  EXPECT_EQ(result.last_line().find("moe.path = \"sm90\": grouped_mlp: path sm90 is required"), 8u)
      << result.last_line();
}

}  // namespace
}  // namespace moiety::app
