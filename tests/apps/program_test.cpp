// Exit codes and messages of the program, eval and generate.
#include "apps/moiety/program.h"

#include <cmath>
#include <cstdlib>

#include "apps/moiety/report/run_directory.h"
#include "moiety/base/gpu.h"
#include "tests/apps/train_helpers.h"

namespace moiety::app {
namespace {

TEST(Program, HelpAndVersionGoToStdout) {
  for (const char* command : {"train", "eval", "generate", "prepare", "quantize", "dequantize"}) {
    const ProgramResult help = run({command, "--help"});
    EXPECT_EQ(help.code, kExitDone);
    EXPECT_EQ(help.err, "");
    for (const char* flag : {"--quiet", "--log-level", "--version", "--help"}) {
      EXPECT_NE(help.out.find(flag), std::string::npos) << command << " " << flag;
    }
    EXPECT_EQ(run({command, "--version"}).out.rfind("moiety ", 0), 0u);
  }
  EXPECT_NE(run({"train", "--help"}).out.find("--moe.capacity_factor=0.0"), std::string::npos);
  EXPECT_EQ(run({"--version"}).out.rfind("moiety ", 0), 0u);
  EXPECT_NE(run({"--help"}).out.find("generate"), std::string::npos);
  EXPECT_EQ(run({}).code, kExitUsage);
}

struct BadCommand {
  Arguments arguments;
  int code;
  const char* message;  // the last line of stderr begins with "moiety: " and this
};

TEST(Program, BadInputIsOneMessageAndAnExitCode) {
  const TemporaryDirectory dir;
  const std::string good = write_tokens(dir / "good.tok", {ramp(400)});
  const std::string cut = write_tokens(dir / "cut.tok", {ramp(400)});
  std::filesystem::resize_file(cut, 4500);
  const std::string text_file = dir.write("text.tok", std::string(9000, 'x'));
  const std::string shorty = write_tokens(dir / "short.tok", {ramp(5)});
  const std::string bad_toml = dir.write("bad.toml", "[moe]\nexperts = 0\n");
  const auto with_data = [](const std::string& file) {
    return Arguments{"--data.synthetic=none", "--data.train=" + file};
  };
  const Arguments base = tiny(dir / "run");
  const BadCommand cases[] = {
      {{"trian"}, kExitUsage, "unknown command 'trian'"},
      {base + Arguments{"--nonsense"}, kExitUsage, "The following argument was not expected"},
      {base + Arguments{"--moe.exprets=4"}, kExitUsage,
       "--moe.exprets=4: unknown key 'moe.exprets'; did you mean 'moe.experts'?"},
      {base + Arguments{"--moe.experts=0"}, kExitUsage, "--moe.experts=0: moe.experts = 0: must"},
      {base + Arguments{"--config=" + bad_toml}, kExitUsage, "/"},
      {base + Arguments{"--config=" + (dir / "none.toml")}, kExitUsage, "/"},
      {base + Arguments{"--parallel.tp=2"}, kExitUsage, "layout: run.ranks = 1 must be dp 1 / 2 x"},
      {base + Arguments{"--run.ranks=3"}, kExitUsage, "train.global_batch = 8: must be a multiple"},
      {base + Arguments{"--parallel.ep=3"}, kExitUsage, "layout: run.ranks = 1 must be"},
      {base + Arguments{"--moe.top_k=5"}, kExitUsage, "moe.top_k=5"},
      {base + Arguments{"--run.dir="}, kExitUsage, "no run directory"},
      {base + with_data(dir / "missing.tok"), kExitData, "/"},
      {base + with_data(cut), kExitData, "/"},
      {base + with_data(text_file), kExitData, "/"},
      {base + with_data(shorty), kExitData, "/"},
      {base + Arguments{"--data.valid=" + cut}, kExitData, "/"},
      {base + Arguments{"--run.init_from=" + (dir / "nowhere")}, kExitCheckpoint, "/"},
      {tiny(good + "/run"), kExitDisk, "/"},  // below a file
      {{"eval", dir / "nowhere", "--data=" + good}, kExitCheckpoint, "/"},
      {{"eval"}, kExitUsage, "CKPT is required"},
      {{"generate", dir / "nowhere"}, kExitCheckpoint, "/"},
      {{"generate", dir / "nowhere", "--temperature=-1"}, kExitUsage, "--temperature"},
      {{"generate", dir / "nowhere", "--run.device=tpu"}, kExitUsage, "--run.device: tpu"},
      {{"eval", dir / "nowhere", "--data=" + good, "--run.device=gpu"}, kExitUsage, "--run.device"},
      {{"prepare", dir / "nowhere", "--tokenizer=bytes", "--out=" + (dir / "o")}, kExitData, "/"},
  };
  for (const BadCommand& c : cases) {
    const ProgramResult result = run(c.arguments);
    std::string all;
    for (const std::string& a : c.arguments) all += a + " ";
    EXPECT_EQ(result.code, c.code) << all << "\n" << result.err;
    EXPECT_EQ(result.last_line().rfind(std::string("moiety: ") + c.message, 0), 0u) << all << "\n"
                                                                                    << result.err;
  }
}

TEST(Program, AGpuThatIsNotThereIsRefusedWithTheReason) {
  const GpuStatus& gpus = gpu_status();
  if (gpus.count > 0) GTEST_SKIP() << "there is one";
  const TemporaryDirectory dir;
  const ProgramResult result = run(tiny(dir / "r") + Arguments{"--run.device=cuda"});
  const std::string expected = "moiety: run.device = \"cuda\": " + gpus.text;
  EXPECT_EQ(result.code, kExitDevice);
  EXPECT_EQ(result.last_line(), expected);
  EXPECT_FALSE(std::filesystem::exists(dir / "r")) << "left something behind";
  for (const Arguments& command :
       {Arguments{"eval", dir / "r", "--data=t.tok"}, Arguments{"generate", dir / "r"}}) {
    const ProgramResult refused = run(command + Arguments{"--run.device=cuda"});
    EXPECT_EQ(refused.code, kExitDevice);
    EXPECT_EQ(refused.last_line(), expected);
  }
}

TEST(Program, AGraphIsForAGpu) {
  const TemporaryDirectory dir;
  const ProgramResult result =
      run(tiny(dir / "r") + Arguments{"--run.device=cpu", "--train.cuda_graph=true"});
  EXPECT_EQ(result.code, kExitUsage);
  EXPECT_EQ(result.last_line(), "moiety: train.cuda_graph = \"true\", but the run is on the CPU");
}

TEST(Program, ALauncherOfSeveralProcessesIsRefused) {
  const TemporaryDirectory dir;
  setenv("WORLD_SIZE", "2", 1);
  const ProgramResult result = run(tiny(dir / "r"));
  unsetenv("WORLD_SIZE");
  EXPECT_EQ(result.code, kExitUsage);
  EXPECT_NE(result.last_line().find("WORLD_SIZE = 2"), std::string::npos);
}

TEST(Program, ASecondTrainerIsRefused) {
  const TemporaryDirectory dir;
  const RunDirectory first(dir / "r");
  const ProgramResult result = run(tiny(dir / "r"));
  EXPECT_EQ(result.code, kExitUsage);
  EXPECT_NE(result.last_line().find("another `moiety train` uses this"), std::string::npos);
}

TEST(Program, PrintConfigReadsBackTheSame) {
  const TemporaryDirectory dir;
  const ProgramResult first = run(tiny(dir / "r", 2, 2) + Arguments{"--print-config"});
  ASSERT_EQ(first.code, kExitDone);
  const std::string path = dir.write("c.toml", first.out);
  const ProgramResult second = run({"train", "--config", path, "--print-config"});
  const std::string again = dir.write("c.toml", second.out);
  EXPECT_EQ(run({"train", "--config", again, "--print-config"}).out, second.out);
}

// One trained model for the tests of eval and generate.
class Inference : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    dir_ = new TemporaryDirectory;
    std::string text;
    while (text.size() < 4000) text += "the quick brown fox jumps over the lazy dog. ";
    dir_->write("text.txt", text);
    ASSERT_EQ(
        run({"prepare", *dir_ / "text.txt", "--tokenizer=bytes", "--out=" + *dir_ / "t"}).code,
        kExitDone);
    const Arguments data{"--data.synthetic=none",
                         "--data.train=" + *dir_ / "t.tok",
                         "--data.valid=" + *dir_ / "t.tok",
                         "--eval.samples=7",
                         "--train.steps=150",
                         "--data.seq_len=64"};
    ASSERT_EQ(run(tiny(*dir_ / "run", 2, 2) + data).code, kExitDone);
  }
  static void TearDownTestSuite() {
    delete dir_;
    dir_ = nullptr;
  }
  static TemporaryDirectory* dir_;
};
TemporaryDirectory* Inference::dir_ = nullptr;

TEST_F(Inference, EvalPrintsWhatTrainingMeasured) {
  const ProgramResult result =
      run({"eval", *dir_ / "run", "--data", *dir_ / "t.tok", "--samples", "7", "--run.device=cpu"});
  ASSERT_EQ(result.code, kExitDone) << result.err;
  EXPECT_EQ(std::count(result.out.begin(), result.out.end(), '\n'), 1);
  const nlohmann::json line = nlohmann::json::parse(result.out);
  const nlohmann::json trained = events(*dir_ / "run", "eval").back();
  const double loss = line["loss"].get<double>();
  EXPECT_LT(loss, 0.5);
  EXPECT_NEAR(loss, trained["loss"].get<double>(), 1e-4 * loss);
  EXPECT_NEAR(line["bits_per_byte"].get<double>(), trained["bits_per_byte"].get<double>(), 1e-4);
  EXPECT_NEAR(line["bits_per_byte"].get<double>(), loss / std::log(2.0), 0.01);
  EXPECT_DOUBLE_EQ(line["perplexity"].get<double>(), std::exp(loss));
  EXPECT_EQ(line["tokens"], 7 * 64);
  EXPECT_EQ(line["step"], 150);
  EXPECT_EQ(line["bal"].size(), 2u);
}

TEST_F(Inference, GenerateContinuesTheText) {
  const Arguments base{"generate", *dir_ / "run", "--prompt=the quick brown", "--tokens=40"};
  const ProgramResult greedy = run(base);
  ASSERT_EQ(greedy.code, kExitDone) << greedy.err;
  EXPECT_EQ(greedy.out.rfind("the quick brown fox jumps over the lazy dog", 0), 0u) << greedy.out;
  EXPECT_EQ(greedy.out.size(), 15u + 40u + 1u);
  EXPECT_EQ(run(base).out, greedy.out);
  const Arguments warm{"--temperature=2", "--top-k=50", "--top-p=0.99", "--seed=3"};
  const std::string sample = run(base + warm).out;
  EXPECT_EQ(run(base + warm).out, sample);
  EXPECT_NE(run(base + warm + Arguments{"--seed=4"}).out, sample);
  EXPECT_EQ(run({"generate", *dir_ / "run", "--tokens=1"}).code, kExitDone);  // no prompt
}

TEST_F(Inference, ADamagedCheckpointIsRefused) {
  const std::string copy = *dir_ / "copy";
  std::filesystem::copy(checkpoint_path(*dir_ / "run", 150), copy,
                        std::filesystem::copy_options::recursive);
  EXPECT_EQ(run({"generate", copy, "--tokens=1"}).code, kExitDone);
  std::filesystem::resize_file(copy + "/rank-00000-of-00002.safetensors", 5000);
  const ProgramResult result = run({"generate", copy, "--tokens=1"});
  EXPECT_EQ(result.code, kExitCheckpoint);
  EXPECT_NE(result.last_line().find("rank-00000-of-00002.safetensors"), std::string::npos);
}

}  // namespace
}  // namespace moiety::app
