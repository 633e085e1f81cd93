// `moiety convert`: a run's checkpoint with its experts in another form, for everything that reads
// checkpoints.
#include "apps/moiety/commands/convert.h"

#include <filesystem>

#include "tests/apps/train_helpers.h"

namespace moiety::app {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// Saved under ep 2 x egtp 2, with experts whose halves have two blocks of 32 rows.
class ConvertCommand : public testing::Test {
 protected:
  static Arguments wide(const std::string& directory) {
    return tiny(directory, 4, 2) +
           Arguments{"--moe.d_ffn=64", "--optim.schedule=constant", "--optim.lr=0.001"};
  }
  static void SetUpTestSuite() {
    dir_ = new TemporaryDirectory;
    write_tokens(*dir_ / "t.tok", {ramp(2000)});
    train(wide(*dir_ / "r") + Arguments{"--parallel.egtp=2"});
    convert("c", {"--expert-weights=indexed", "--glu-interleave=32"});
  }
  static void TearDownTestSuite() {
    delete dir_;
    dir_ = nullptr;
  }
  static void convert(const std::string& name, const Arguments& how, const std::string& of = "r") {
    const ProgramResult result =
        run(Arguments{"convert", *dir_ / of, "--out=" + *dir_ / name} + how);
    ASSERT_EQ(result.code, kExitDone) << result.err;
  }
  static std::string plain() { return checkpoint_path(*dir_ / "r", 6); }
  static std::string converted() { return *dir_ / "c"; }

  static TemporaryDirectory* dir_;
};
TemporaryDirectory* ConvertCommand::dir_ = nullptr;

TEST_F(ConvertCommand, ResumesUnderAnotherLayoutAsIfNothingHadBeen) {
  const Arguments further = Arguments{"--train.steps=16"};
  const Arguments other =
      further + Arguments{"--parallel.ep=1", "--parallel.tp=2", "--parallel.gtp=2"};
  train(wide(*dir_ / "from_c") + other + Arguments{"--run.resume=" + converted()});
  train(wide(*dir_ / "from_r") + other + Arguments{"--run.resume=" + plain()});
  const auto of_c = steps(*dir_ / "from_c"), of_r = steps(*dir_ / "from_r");
  ASSERT_EQ(of_c.size(), 10u);
  for (const auto& [step, record] : of_c) EXPECT_EQ(record["loss"], of_r.at(step)["loss"]);
  EXPECT_EQ(digests(checkpoint_path(*dir_ / "from_c", 16)),
            digests(checkpoint_path(*dir_ / "from_r", 16)));
  // The layout that goes on as it was.
  train(wide(*dir_ / "on") + further + Arguments{"--parallel.egtp=2", "--run.resume=" + plain()});
  expect_losses_near(*dir_ / "from_c", *dir_ / "on", 1e-4);
}

TEST_F(ConvertCommand, GoesBackToTheSameBits) {
  convert("back", {"--expert-weights=packed", "--glu-interleave=0", "--quiet"}, "c");
  EXPECT_EQ(digests(*dir_ / "back"), digests(plain()));
  // Weights and moments, two layers, two modules of four experts.
  const auto indexed = digests(converted());
  EXPECT_EQ(indexed.size() - digests(plain()).size(), 3u * 2 * 2 * 3);
  EXPECT_TRUE(indexed.contains("exp_avg_sq/layers.1.moe.experts.fc2.weight3"));
}

TEST_F(ConvertCommand, EveryReaderTakesIt) {
  for (const Arguments& how :
       {Arguments{"--samples=4"}, Arguments{"--run.threads=1", "--samples=4"}}) {
    std::vector<Json> lines;
    for (const std::string& path : {plain(), converted()}) {
      const ProgramResult result = run(Arguments{"eval", path, "--data", *dir_ / "t.tok"} + how);
      ASSERT_EQ(result.code, kExitDone) << result.err;
      lines.push_back(Json::parse(result.out));
    }
    EXPECT_EQ(lines[0]["loss"], lines[1]["loss"]);
  }
  const auto generated = [](const std::string& path) {
    return run({"generate", path, "--tokens=8", "--temperature=0", "--prompt=a"}).out;
  };
  EXPECT_EQ(generated(converted()), generated(plain()));
  EXPECT_EQ(run({"verify", converted()}).code, kExitDone);
  for (const char* name : {"i_c", "i_r"}) {
    const std::string& from = name[2] == 'c' ? converted() : plain();
    train(tiny(*dir_ / name, 2, 2) +
          Arguments{"--moe.d_ffn=64", "--train.steps=2", "--run.init_from=" + from});
  }
  EXPECT_EQ(digests(checkpoint_path(*dir_ / "i_c", 2)), digests(checkpoint_path(*dir_ / "i_r", 2)));
}

TEST_F(ConvertCommand, InfoListsTensors) {
  const Json of_c = Json::parse(run({"info", converted(), "--tensors", "--json"}).out);
  const Json of_r = Json::parse(run({"info", *dir_ / "r", "--tensors", "--json"}).out);
  EXPECT_EQ(of_c["expert_weights"], "indexed");
  EXPECT_EQ(of_c["glu_interleave"], 32);
  EXPECT_EQ(of_r["expert_weights"], "packed");
  EXPECT_EQ(of_r["glu_interleave"], 0);
  const auto find = [](const Json& info, const std::string& name) {
    for (const Json& tensor : info["tensors"]) {
      if (tensor["name"] == name) return tensor;
    }
    return Json();
  };
  const Json one = find(of_c, "layers.0.moe.experts.fc1.weight3");
  EXPECT_EQ(one["shape"], (Json{128, 32}));
  EXPECT_EQ(one["slots"]["exp_avg"], "float32");
  EXPECT_EQ(one["layout"], "indexed, interleave 32");
  EXPECT_EQ(find(of_c, "layers.0.moe.experts.fc2.weight0")["layout"], "indexed");
  const Json all = find(of_r, "layers.0.moe.experts.fc1.weight");
  EXPECT_EQ(all["shape"], (Json{4, 128, 32}));
  EXPECT_EQ(all["layout"], "packed, interleave 0");
  EXPECT_FALSE(find(of_r, "layers.0.attn.q.weight").contains("layout"));
  const std::string words = run({"info", converted(), "--tensors"}).out;
  EXPECT_NE(words.find("experts      indexed, interleave 32\n"), std::string::npos) << words;
  EXPECT_NE(words.find("layers.0.moe.experts.fc1.weight3 [128,32]: exp_avg float32, exp_avg_sq "
                       "float32, weight float32; indexed, interleave 32\n"),
            std::string::npos)
      << words;
}

TEST_F(ConvertCommand, RefusesWhatDoesNotFit) {
  const auto refused = [](const Arguments& how, ExitCode code) {
    const ProgramResult result = run(Arguments{"convert", converted()} + how);
    EXPECT_EQ(result.code, code) << result.err;
    return result.last_line();
  };
  const std::string out = "--out=" + *dir_ / "x";
  EXPECT_NE(refused({out, "--glu-interleave=128"}, kExitUsage)
                .find("layers.0.moe.experts.fc1.weight0: interleave 128 must be 0"),
            std::string::npos);
  EXPECT_NE(refused({out, "--glu-interleave=12"}, kExitUsage).find("--glu-interleave 12: must be"),
            std::string::npos);
  EXPECT_NE(refused({out, "--expert-weights=grouped"}, kExitUsage).find("packed | indexed"),
            std::string::npos);
  EXPECT_NE(refused({"--out=" + *dir_ / "r"}, kExitUsage).find("is there already"),
            std::string::npos);
  refused({"--out=" + *dir_ / "none/x"}, kExitDisk);
  EXPECT_FALSE(fs::exists(*dir_ / "x"));
}

}  // namespace
}  // namespace moiety::app
