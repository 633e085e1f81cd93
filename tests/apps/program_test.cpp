// Exit codes and messages of the program, eval and generate.
#include "apps/moiety/program.h"

#include <cmath>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <sys/stat.h>
#include <unistd.h>

#include "apps/moiety/report/run_directory.h"
#include "moiety/base/crc32c.h"
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
      {base + Arguments{"--nonsense", "3"}, kExitUsage, "--nonsense 3: not expected"},
      {base + Arguments{"--train.steps", "3"}, kExitUsage,
       "--train.steps 3: a key and its value are one word, --train.steps=3"},
      {base + Arguments{"--moe.exprets=4"}, kExitUsage,
       "--moe.exprets=4: unknown key 'moe.exprets'; did you mean 'moe.experts'?"},
      {base + Arguments{"--moe.experts=0"}, kExitUsage, "--moe.experts=0: moe.experts = 0: must"},
      {base + Arguments{"--config=" + bad_toml}, kExitUsage, "/"},
      {base + Arguments{"--config=" + (dir / "none.toml")}, kExitUsage, "/"},
      {base + Arguments{"--parallel.tp=2"}, kExitUsage,
       "layout: run.ranks = 1: must be a multiple of parallel.gtp"},
      {base + Arguments{"--run.ranks=3"}, kExitUsage, "train.global_batch = 8: must be a multiple"},
      {base + Arguments{"--parallel.ep=3"}, kExitUsage,
       "layout: run.ranks = 1: must be a multiple of parallel.ep"},
      {base + Arguments{"--moe.top_k=5"}, kExitUsage, "moe.top_k=5"},
      {base + Arguments{"--run.dir="}, kExitUsage, "no run directory"},
      {base + with_data(dir / "missing.tok"), kExitData, "/"},
      {base + with_data(cut), kExitData, "/"},
      {base + with_data(text_file), kExitData, "/"},
      {base + with_data(shorty), kExitData, "/"},
      {base + Arguments{"--data.valid=" + cut}, kExitData, "/"},
      {base + Arguments{"--run.init_from=" + (dir / "nowhere")}, kExitCheckpoint,
       "run.init_from: /"},
      {tiny(good + "/run"), kExitDisk, "/"},  // below a file
      {{"eval", dir / "nowhere", "--data=" + good}, kExitCheckpoint, "/"},
      {{"eval"}, kExitUsage, "CKPT is required"},
      {{"generate", dir / "nowhere"}, kExitCheckpoint, "/"},
      {{"generate", dir / "nowhere", "--temperature=-1"}, kExitUsage, "--temperature"},
      {{"generate", dir / "nowhere", "--run.device=tpu"},
       kExitUsage,
       "--run.device tpu: must be one of auto | cpu | cuda"},
      {{"eval", dir / "nowhere", "--data=" + good, "--run.device=gpu"}, kExitUsage, "--run.device"},
      {{"generate", dir / "nowhere", "--temperature=nan"},
       kExitUsage,
       "--temperature nan: must be a number, 0..100"},
      {{"generate", dir / "nowhere", "--tokens=99999999999999999999"},
       kExitUsage,
       "--tokens 99999999999999999999: must be an integer, 1..16777216"},
      {{"generate", dir / "nowhere", "--tokens", ""}, kExitUsage, "--tokens \"\": must be"},
      {{"generate", dir / "nowhere", "--top-p=nan"}, kExitUsage, "--top-p nan: must be a number"},
      {{"generate", dir / "nowhere", "--seed=-1"}, kExitUsage, "--seed -1: must be an integer"},
      {{"eval", dir / "nowhere", "--data=x", "--samples=0"},
       kExitUsage,
       "--samples 0: must be an integer, 1..16777216"},
      {{"quantize", "x.npy", "--out=q", "--format=foo"},
       kExitUsage,
       "--format foo: must be one of fp8_tensor | fp8_block_1x128 | fp8_block_128x128 | mxfp8 | "
       "mxfp8_tile32 | nvfp4 | nvfp4_tile16"},
      {{"quantize", "x.npy", "--out=q", "--format=nvfp4", "--rounding=stochastic", "--draw=-1"},
       kExitUsage,
       "--draw -1: must be an integer, 0..2^64 - 1"},
      {{"prepare", "x", "--out=o", "--format=xml"},
       kExitUsage,
       "--format xml: must be one of auto | text | jsonl"},
      {{"plot", "x", "--out=o", "--x=foo"}, kExitUsage, "--x foo: must be one of steps | tokens"},
      {{"eval", "--log-level=loud"},
       kExitUsage,
       "--log-level loud: must be one of debug | info | warning | error"},
      {{"train", "--ranks=1", "--ranks=2"}, kExitUsage, "--ranks: is given 2 times"},
      {{"plan", "--gtp", "--from=5", "--to=3"}, kExitUsage, "--from 5 and --to 3: the end must be"},
      {{"plan", "--gtp", "--from=nan"}, kExitUsage, "--from nan: must be a number"},
      {{"plan", "--gtp", "--precision.recipe=bf16", "--train.global_batch=1048576"},
       kExitUsage,
       "train.global_batch = 1048576: makes 1048576 micro-batches; of 4 layers at most 16384 are"},
      {{"doctor", "--dir", dir / "nowhere"}, kExitUsage, "--dir /"},
      {base + Arguments{"--train.micro_batch=9223372036854775807"}, kExitUsage,
       "--train.micro_batch=9223372036854775807: train.micro_batch = 9223372036854775807: must be "
       "an integer, 1..65536"},
      {base + Arguments{"--checkpoint.keep_last=4294967297"}, kExitUsage, "--checkpoint.keep_last"},
      {base + Arguments{"--guard.comm_timeout_s=1e300"}, kExitUsage, "--guard.comm_timeout_s"},
      {base + Arguments{"--run.resume=Never"}, kExitCheckpoint,
       "run.resume (auto, never, must or a checkpoint): Never: no such directory"},
      {base + Arguments{"--run.device=a\nb"}, kExitUsage, "--run.device=a\\nb: run.device ="},
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

// Runs with stdout on a disk that is full.
ProgramResult run_to_full_disk(const Arguments& arguments) {
  ProgramResult result;
  testing::internal::CaptureStderr();
  std::fflush(stdout);
  const int out = ::dup(STDOUT_FILENO), full = ::open("/dev/full", O_WRONLY);
  ::dup2(full, STDOUT_FILENO);
  result.code = run_program(arguments);
  ::dup2(out, STDOUT_FILENO);
  ::close(full);
  ::close(out);
  result.err = testing::internal::GetCapturedStderr();
  return result;
}

TEST(Program, AResultThatCannotBeWrittenIsAnError) {
  const TemporaryDirectory dir;
  const std::string steps = dir.write("m.jsonl", "{\"v\":1,\"t\":1,\"step\":1,\"loss\":5}\n");
  const std::string words = dir.write("words.txt", "some words");
  for (const Arguments& arguments :
       {Arguments{"--help"}, Arguments{"--version"}, Arguments{"train", "--help"},
        Arguments{"train", "--print-config"}, Arguments{"train", "--help=markdown"},
        Arguments{"plot", steps, "--out=-"}, Arguments{"plan", "--gtp"},
        Arguments{"plan", "--gtp", "--out=-"}, Arguments{"doctor"}, Arguments{"doctor", "--json"},
        Arguments{"prepare", words, "--quiet", "--out=" + (dir / "words")}}) {
    const ProgramResult result = run_to_full_disk(arguments);
    EXPECT_EQ(result.code, kExitDisk) << arguments[0];
    EXPECT_EQ(result.err, "moiety: stdout: the result cannot be written: No space left on device\n")
        << arguments[0];
  }
}

TEST(Program, WhatDoesNotStartLeavesNothing) {
  const TemporaryDirectory dir;
  const auto left = [&] { return std::filesystem::exists(dir / "a"); };
  EXPECT_EQ(run(tiny(dir / "a/b/c") + Arguments{"--dry-run"}).code, kExitDone);
  EXPECT_FALSE(left());
  EXPECT_EQ(run(tiny(dir / "a/b/c") +
                Arguments{"--model.d_model=1024", "--model.layers=1024", "--moe.d_ffn=1024"})
                .code,
            kExitMemory);
  EXPECT_FALSE(left());
  std::filesystem::create_directories(dir / "a");
  EXPECT_EQ(run(tiny(dir / "a/b/c") + Arguments{"--dry-run"}).code, kExitDone);
  EXPECT_TRUE(left());
  EXPECT_TRUE(std::filesystem::is_empty(dir / "a"));
}

TEST(Program, ErrorsOfFileSystemsAreOfTheDisk) {
  try {
    throw std::filesystem::filesystem_error("status", "run/COMMIT",
                                            std::make_error_code(std::errc::permission_denied));
  } catch (...) {
    const Failure failure = current_failure();
    EXPECT_EQ(failure.code(), kExitDisk);
    EXPECT_EQ(failure.text, "run/COMMIT: Permission denied");
  }
}

TEST(Program, TheLastLineIsOneLine) {
  testing::internal::CaptureStderr();
  print_failure({ErrorKind::kUsage, "a\nb\x1b[1m" + std::string(100000, 'x')});
  const std::string line = testing::internal::GetCapturedStderr();
  EXPECT_EQ(line.find('\n'), line.size() - 1);
  EXPECT_EQ(line.rfind("moiety: a\\nb\\x1b[1mxxx", 0), 0u);
  EXPECT_LT(line.size(), 5000u);
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

// What a command says on a terminal.
std::string on_terminal(const Arguments& arguments) {
  const int master = ::posix_openpt(O_RDWR | O_NOCTTY);
  if (master < 0 || ::grantpt(master) != 0 || ::unlockpt(master) != 0) return "no terminal";
  const int terminal = ::open(::ptsname(master), O_RDWR | O_NOCTTY);
  const int before = ::dup(STDOUT_FILENO);
  ::dup2(terminal, STDOUT_FILENO);
  run_program(arguments);
  ::dup2(before, STDOUT_FILENO);
  ::close(before);
  char bytes[4096];
  const ssize_t n = ::read(master, bytes, sizeof bytes);
  ::close(terminal);
  ::close(master);
  return n > 0 ? std::string(bytes, size_t(n)) : "";
}

TEST_F(Inference, EvalSaysASentenceOnATerminal) {
  const Arguments eval{"eval", *dir_ / "run", "--data", *dir_ / "t.tok", "--samples=7"};
  const std::string sentence = on_terminal(eval);
  EXPECT_NE(sentence.find("nats a token, perplexity 1."), std::string::npos) << sentence;
  EXPECT_NE(sentence.find("bits a byte, over 448 tokens; the busiest expert"), std::string::npos)
      << sentence;
  EXPECT_EQ(nlohmann::json::parse(on_terminal(eval + Arguments{"--json"}))["tokens"], 448);
}

TEST_F(Inference, SamplesAndStopTexts) {
  const Arguments base{"generate", *dir_ / "run", "--prompt=the quick brown", "--tokens=40"};
  const ProgramResult stopped = run(base + Arguments{"--stop=jump", "--stop=never"});
  EXPECT_EQ(stopped.out, "the quick brown fox \n");
  const Arguments warm{"--temperature=5", "--top-k=4", "--seed=3", "--samples=3"};
  const ProgramResult three = run(base + warm + Arguments{"--json"});
  ASSERT_EQ(three.code, kExitDone) << three.err;
  std::set<std::string> texts;
  std::istringstream lines(three.out);
  for (std::string line; std::getline(lines, line);) {
    const nlohmann::json json = nlohmann::json::parse(line);
    EXPECT_EQ(json["sample"], texts.size());
    EXPECT_EQ(json["prompt"], "the quick brown");
    texts.insert(json["text"].get<std::string>());
  }
  EXPECT_EQ(texts.size(), 3u);
  const std::string first =
      nlohmann::json::parse(three.out.substr(0, three.out.find('\n')))["text"].get<std::string>();
  const std::string spoken = run(base + warm).out;
  EXPECT_EQ(spoken.rfind("the quick brown" + first + "\n---\nthe quick brown", 0), 0u) << spoken;
  EXPECT_EQ(run(base + Arguments{"--stop="}).code, kExitUsage);
}

TEST_F(Inference, EveryLineIsAPromptOfItsOwn) {
  const std::string input = dir_->write("lines.txt", "the quick\nover the lazy\n");
  const int before = ::dup(STDIN_FILENO);
  const int lines = ::open(input.c_str(), O_RDONLY);
  ::dup2(lines, STDIN_FILENO);
  const ProgramResult result =
      run({"generate", *dir_ / "run", "--interactive", "--tokens=30", "--stop=."});
  ::dup2(before, STDIN_FILENO);
  ::close(before);
  ::close(lines);
  EXPECT_EQ(result.code, kExitDone) << result.err;
  EXPECT_EQ(result.out, "the quick brown fox jumps over the lazy\nover the lazy dog\n")
      << result.err;
  EXPECT_EQ(run({"generate", *dir_ / "run", "--interactive", "--prompt=a"}).code, kExitUsage);
}

TEST_F(Inference, BeyondTheTrainedLengthIsAWarning) {
  const Arguments base{"generate", *dir_ / "run", "--prompt=the"};
  EXPECT_EQ(run(base + Arguments{"--tokens=61"}).err, "");
  EXPECT_NE(run(base + Arguments{"--tokens=62"})
                .err.find("up to 65 tokens with the prompt; the model was trained on 64"),
            std::string::npos);
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

// Replaces a text in the manifest of a copy of the checkpoint, and makes COMMIT fit.
std::string changed_checkpoint(const std::string& from, const std::string& to,
                               const std::string& old_text, const std::string& new_text) {
  std::filesystem::copy(from, to, std::filesystem::copy_options::recursive);
  std::string manifest = read_all(to + "/manifest.json");
  const size_t at = manifest.find(old_text);
  EXPECT_NE(at, std::string::npos) << old_text;
  manifest.replace(at, old_text.size(), new_text);
  std::ofstream(to + "/manifest.json") << manifest;
  std::istringstream commit(read_all(to + "/COMMIT"));
  std::string word, version, id;
  commit >> word >> version >> id;
  std::ofstream(to + "/COMMIT") << text("{} {} {} {} {:08x}\n", word, version, id, manifest.size(),
                                        crc32c(manifest.data(), manifest.size()));
  return to;
}

TEST_F(Inference, ACheckpointWithAHostileConfigIsRefusedByName) {
  const std::string good = checkpoint_path(*dir_ / "run", 150);
  const auto refused = [&](const std::string& name, const std::string& a, const std::string& b) {
    const std::string path = changed_checkpoint(good, *dir_ / name, a, b);
    const ProgramResult result = run({"eval", path, "--data", *dir_ / "t.tok"});
    EXPECT_EQ(result.code, kExitCheckpoint) << result.err;
    EXPECT_EQ(result.last_line().rfind("moiety: " + path, 0), 0u) << result.err;
    return result.last_line();
  };
  EXPECT_NE(refused("top_k", "top_k = 2", "top_k = 9").find("moe.top_k=9 must be in 1..4"),
            std::string::npos);
  std::string deep = "a";
  for (int i = 0; i < 50000; ++i) deep += ".a";
  EXPECT_NE(refused("deep", "[run]", "[" + deep + "]").find("a key of more than 8 parts"),
            std::string::npos);
}

TEST_F(Inference, FilesOfACheckpointThatAreNoneAreRefused) {
  for (const char* name : {"COMMIT", "manifest.json", "rank-00000-of-00002.safetensors"}) {
    const std::string copy = *dir_ / (std::string("fifo-") + name);
    std::filesystem::copy(checkpoint_path(*dir_ / "run", 150), copy);
    std::filesystem::remove(copy + "/" + name);
    ASSERT_EQ(::mkfifo((copy + "/" + name).c_str(), 0600), 0);
    const ProgramResult result = run({"generate", copy, "--tokens=1"});
    EXPECT_EQ(result.code, kExitCheckpoint) << result.err;
    EXPECT_NE(result.last_line().find(name), std::string::npos) << result.err;
  }
}

}  // namespace
}  // namespace moiety::app
