// A tokenizer.json from a text to a continuation, by the program alone.
#include "moiety/data/tokenizer.h"

#include <filesystem>
#include <string>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/apps/train_helpers.h"
#include "tests/support/files.h"

namespace moiety::app {
namespace {

namespace fs = std::filesystem;

nlohmann::json golden(const std::string& name) {
  return nlohmann::json::parse(
      read_all(MOIETY_SOURCE_DIR "/tests/golden/tokenizers/" + name + ".json"))["tokenizer"];
}

std::string identity_of(const std::string& path) {
  return data::hex(data::Tokenizer::load(path).identity());
}

// A run of a few steps with the tokenizer "llama3" of the goldens.
class TokenizerRun : public testing::Test {
 protected:
  void SetUp() override {
    dir.write("given/tokenizer.json", golden("llama3").dump());
    dir.write("given/tokenizer_config.json", R"({"eos_token": "<|endoftext|>"})");
    dir.write("other/tokenizer.json", golden("qwen3").dump());
    std::string text;
    for (int i = 0; i < 120; ++i) text += "the quick brown fox jumps over 12345 lazy dogs. ";
    dir.write("text.txt", text);
    for (const char* name : {"given", "other"}) {
      ASSERT_EQ(run({"prepare", dir / "text.txt", "--tokenizer", dir / name, "--out", dir / name,
                     "--quiet"})
                    .code,
                kExitDone);
    }
  }
  Arguments training(const std::string& tokenizer, const std::string& data, int steps) {
    return tiny(dir / "run") +
           Arguments{"--data.synthetic=none",         "--data.train=" + data,
                     "--data.tokenizer=" + tokenizer, "--data.seq_len=64",
                     "--checkpoint.interval=2",       "--train.steps=" + std::to_string(steps)};
  }
  TemporaryDirectory dir;
};

TEST_F(TokenizerRun, KeepsItsTokenizerAndUsesTheCopy) {
  const std::string identity = identity_of(dir / "given");
  ASSERT_EQ(run(training(dir / "given", dir / "given.tok", 2)).code, kExitDone);
  const std::string checkpoint = checkpoint_path(dir / "run", 2);
  EXPECT_EQ(identity_of(checkpoint), identity);
  EXPECT_EQ(identity_of(dir / "run/tokenizer"), identity);
  // From here on only the copies are left.
  fs::rename(dir / "given", dir / "gone");
  const ProgramResult eval =
      run({"eval", dir / "run", "--data", dir / "given.tok", "--samples", "2"});
  EXPECT_EQ(eval.code, kExitDone) << eval.err;
  const ProgramResult text = run({"generate", dir / "run", "--prompt=the quick", "--tokens=5"});
  EXPECT_EQ(text.code, kExitDone) << text.err;
  EXPECT_EQ(text.out.substr(0, 9), "the quick");
  const ProgramResult none = run({"generate", dir / "run", "--tokens=2", "--json"});
  EXPECT_EQ(none.code, kExitDone) << none.err;
  EXPECT_EQ(run({"convert", dir / "run", "--out", dir / "converted", "--quiet"}).code, kExitDone);
  EXPECT_EQ(identity_of(dir / "converted"), identity);
  EXPECT_EQ(run({"verify", dir / "run"}).code, kExitDone);
  EXPECT_EQ(run({"info", dir / "run"}).code, kExitDone);
  const ProgramResult on = run(training(dir / "given", dir / "given.tok", 4));
  EXPECT_EQ(on.code, kExitDone) << on.err;
  EXPECT_EQ(events(dir / "run", "resume").size(), 1u);
  // Another path of the same tokenizer is no other one.
  const ProgramResult moved = run(training(dir / "gone", dir / "given.tok", 5));
  EXPECT_EQ(moved.code, kExitDone) << moved.err;
}

TEST_F(TokenizerRun, RefusesAnotherTokenizerWithBothIdentities) {
  const ProgramResult wrong = run(training(dir / "given", dir / "other.tok", 2));
  EXPECT_EQ(wrong.code, kExitData);
  for (const char* name : {"given", "other"}) {
    EXPECT_NE(wrong.err.find(identity_of(dir / name)), std::string::npos) << wrong.err;
  }
  ASSERT_EQ(run(training(dir / "given", dir / "given.tok", 2)).code, kExitDone);
  const ProgramResult other =
      run(training(dir / "other", dir / "other.tok", 4) + Arguments{"--model.vocab=400"});
  EXPECT_EQ(other.code, kExitCheckpoint) << other.err;
  for (const char* name : {"given", "other"}) {
    EXPECT_NE(other.err.find(identity_of(dir / name)), std::string::npos) << other.err;
  }
  const ProgramResult eval = run({"eval", dir / "run", "--data", dir / "other.tok"});
  EXPECT_EQ(eval.code, kExitData) << eval.err;
}

TEST_F(TokenizerRun, WorkersChangeNoByte) {
  std::string lines;
  for (int64_t i = 0; lines.size() < (3 << 20); ++i) {
    lines +=
        text("{{\"text\": \"{} \u00e9t\u00e9 number {} of the quick brown foxes\"}}\n", i * i, i);
  }
  const std::string jsonl = dir.write("many.jsonl", lines);
  for (const char* workers : {"1", "3"}) {
    ASSERT_EQ(run({"prepare", jsonl, "--tokenizer", dir / "given", "--out", dir / workers,
                   "--workers", workers, "--quiet"})
                  .code,
              kExitDone);
  }
  EXPECT_EQ(read_all(dir / "1.tok"), read_all(dir / "3.tok"));
}

TEST_F(TokenizerRun, InfoShowsDocumentsOfAKnownTokenizer) {
  const ProgramResult unknown = run({"info", dir / "given.tok", "--json"});
  EXPECT_EQ(nlohmann::json::parse(unknown.out)["tokenizer"], identity_of(dir / "given"));
  const ProgramResult known =
      run({"info", dir / "given.tok", "--json", "--tokenizer", dir / "given"});
  ASSERT_EQ(known.code, kExitDone) << known.err;
  const nlohmann::json shown = nlohmann::json::parse(known.out)["content"][0];
  EXPECT_EQ(shown["text"].get<std::string>().substr(0, 19), "the quick brown fox");
  EXPECT_EQ(run({"info", dir / "given.tok", "--tokenizer", dir / "other"}).code, kExitData);
}

}  // namespace
}  // namespace moiety::app
