// `moiety eval` and `moiety generate` on a GPU, through the program: against the CPU, again, and
// what they refuse.
#include "tests/apps/train_helpers.h"
#include "tests/support/gpu_test.h"

namespace moiety::app {
namespace {

const Arguments kOnGpu{"--run.device=cuda"};
const Arguments kOnCpu{"--run.device=cpu"};

Arguments recipe(const char* name) { return {text("--precision.recipe={}", name)}; }

class InferenceGpu : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    std::string sentences;
    while (sentences.size() < 4000) sentences += kSentence;
    dir.write("text.txt", sentences);
    ASSERT_EQ(run({"prepare", dir / "text.txt", "--tokenizer=bytes", "--out=" + dir / "t"}).code,
              kExitDone);
  }

  // A run that knows the sentence by heart. Returns its directory.
  std::string learned(const std::string& name, const Arguments& more) const {
    train(tiny(dir / name) + kOnGpu +
          Arguments{"--data.synthetic=none", "--data.train=" + dir / "t.tok", "--train.steps=150",
                    "--data.seq_len=256", "--train.micro_batch=2", "--train.global_batch=2"} +
          more);
    return dir / name;
  }
  // A run of a few steps, for which any text is a surprise.
  std::string begun(const std::string& name, const Arguments& more) const {
    train(tiny(dir / name) + more);
    return dir / name;
  }

  ProgramResult evaluate(const std::string& directory, const Arguments& more) const {
    const ProgramResult result =
        run(Arguments{"eval", directory, "--data=" + dir / "t.tok", "--samples=20"} + more);
    EXPECT_EQ(result.code, kExitDone) << result.err;
    return result;
  }
  double loss(const std::string& directory, const Arguments& more) const {
    return nlohmann::json::parse(evaluate(directory, more).out)["loss"].get<double>();
  }
  void expect_near_the_cpu(const std::string& directory, double bound) const {
    const double want = loss(directory, kOnCpu);
    EXPECT_NEAR(loss(directory, kOnGpu), want, bound * want) << directory;
  }

  static std::string generate(const std::string& directory, const std::string& prompt,
                              const Arguments& more) {
    const ProgramResult result =
        run(Arguments{"generate", directory, "--prompt=" + prompt, "--tokens=60"} + more);
    EXPECT_EQ(result.code, kExitDone) << result.err;
    return result.out;
  }

  static constexpr const char* kSentence = "the quick brown fox jumps over the lazy dog. ";
  TemporaryDirectory dir;
};

TEST_F(InferenceGpu, EvalIsNearTheCpu) {
  const std::string name =
      begun("fp32", kOnCpu + Arguments{"--moe.shared_d_ffn=16", "--moe.shared_gate=true",
                                       "--model.dense_layers=[0]", "--model.d_ffn_dense=32"});
  expect_near_the_cpu(name, 1e-4);
  const std::string line = evaluate(name, kOnGpu).out;
  EXPECT_EQ(evaluate(name, kOnGpu).out, line);
  EXPECT_EQ(evaluate(name, {}).out, line) << "auto";
}

TEST_F(InferenceGpu, EvalOfARecipeIsNearTheCpu) {
  for (const char* format : {"bf16", "fp8_block", "mxfp8", "nvfp4"}) {
    const std::string name =
        begun(format, kOnCpu + recipe(format) +
                          Arguments{"--model.d_model=128", "--moe.d_ffn=128", "--optim.lr=0.001"});
    expect_near_the_cpu(name, 0.02);
    EXPECT_EQ(generate(name, "a", kOnGpu), generate(name, "a", kOnGpu)) << format;
  }
}

// The optimizer has cast the weights there; here they are quantized for every use.
TEST_F(InferenceGpu, EvalIsTheValidationOfTheRun) {
  for (const char* format : {"fp32", "bf16", "mxfp8", "nvfp4"}) {
    const std::string name = begun(
        format, kOnGpu + recipe(format) +
                    Arguments{"--model.d_model=128", "--moe.d_ffn=128",
                              "--data.valid=[\"" + dir / "t.tok" + "\"]", "--eval.samples=20"});
    const double trained = events(name, "eval").back()["loss"].get<double>();
    EXPECT_EQ(loss(name, kOnGpu), trained) << format;
  }
}

TEST_F(InferenceGpu, GenerateGivesTheTokensOfTheCpu) {
  const std::string name = learned("fp32", {});
  std::string beginning;  // of more tokens than a tile has
  while (beginning.size() < 200) beginning += kSentence;
  for (const std::string& prompt : {std::string("the quick brown"), beginning}) {
    const std::string out = generate(name, prompt, kOnGpu);
    EXPECT_EQ(out, generate(name, prompt, kOnCpu));
    EXPECT_EQ(out, generate(name, prompt, kOnGpu)) << "again";
  }
  const Arguments warm{"--temperature=2", "--top-k=50", "--top-p=0.99"};
  const std::string sample = generate(name, "the", kOnGpu + warm);
  EXPECT_EQ(generate(name, "the", kOnGpu + warm), sample);
  EXPECT_NE(generate(name, "the", kOnGpu + warm + Arguments{"--seed=3"}), sample);
  EXPECT_EQ(run({"generate", name, "--tokens=1"}).code, kExitDone);  // no prompt, no device
}

// Tiles and the plain kernel serve the heads, and cuDNN the beginning.
TEST_F(InferenceGpu, GenerateTakesHeadsOfAnySize) {
  std::string beginning;
  while (beginning.size() < 130) beginning += kSentence;
  for (const int head : {8, 32, 64, 96, 128}) {
    const std::string name = learned(text("head{}", head),
                                     recipe("bf16") + Arguments{text("--model.head_dim={}", head)});
    for (const std::string& prompt : {std::string("the quick brown"), beginning}) {
      const std::string out = generate(name, prompt, kOnGpu);
      EXPECT_EQ(out, generate(name, prompt, kOnGpu)) << head;
      std::string expected;
      while (expected.size() < out.size()) expected += kSentence;
      EXPECT_EQ(out, expected.substr(0, prompt.size() + 60) + "\n") << head;
    }
  }
}

// The layout of the run does not matter; here there is one rank.
TEST_F(InferenceGpu, ARunOfSeveralRanksIsEvaluatedByOne) {
  const std::string name = dir / "two";
  train(tiny(name, 2, 2));
  expect_near_the_cpu(name, 1e-4);
  for (const char* command : {"eval", "generate"}) {
    for (const char* ranks : {"--ranks=2", "--run.ranks=2"}) {
      Arguments arguments = Arguments{command, name, ranks} + kOnGpu;
      if (command == std::string_view("eval")) arguments.push_back("--data=" + dir / "t.tok");
      const ProgramResult result = run(arguments);
      EXPECT_EQ(result.code, kExitUsage) << result.err;
      EXPECT_NE(result.last_line().find(ranks), std::string::npos) << result.err;
    }
  }
}

TEST_F(InferenceGpu, ACacheThatDoesNotFitIsNamed) {
  // 2^24 tokens, the most that may be asked for, of 2 layers with 128 heads of 64 in fp32.
  const std::string name =
      begun("run",
            Arguments{"--model.heads=128", "--model.kv_heads=128", "--model.head_dim=64"} + kOnGpu);
  const ProgramResult result =
      run(Arguments{"generate", name, "--prompt=a", "--tokens=16777216"} + kOnGpu);
  EXPECT_EQ(result.code, kExitMemory) << result.err;
  EXPECT_NE(result.last_line().find("KV cache"), std::string::npos) << result.err;
}

}  // namespace
}  // namespace moiety::app
