// `moiety info`, `moiety verify` and `moiety repair` through the program.
#include "apps/moiety/commands/info.h"

#include <filesystem>

#include "apps/moiety/commands/info_sheet.h"
#include "tests/apps/train_helpers.h"

namespace moiety::app {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// A token file of two documents, made by prepare.
std::string two_documents(const TemporaryDirectory& dir) {
  dir.write("text.jsonl", "{\"text\":\"first\\nline\"}\n{\"text\":\"second \xc3\xa9\"}\n");
  EXPECT_EQ(run({"prepare", dir / "text.jsonl", "--tokenizer=bytes", "--out=" + dir / "t"}).code,
            kExitDone);
  return dir / "t.tok";
}

class OfARun : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    dir_ = new TemporaryDirectory;
    train(tiny(*dir_ / "r", 2, 2) + Arguments{"--checkpoint.interval=3", "--eval.every=3",
                                              "--data.synthetic=none", "--eval.samples=4",
                                              "--data.train=" + text_file(),
                                              "--data.valid=" + text_file()});
  }
  static void TearDownTestSuite() {
    delete dir_;
    dir_ = nullptr;
  }
  static std::string text_file() {
    const std::string path = *dir_ / "t.tok";
    return fs::exists(path) ? path : write_tokens(path, {ramp(2000)});
  }
  // A copy of the newest checkpoint.
  std::string copy(const std::string& name) {
    const std::string to = *dir_ / name;
    fs::remove_all(to);
    fs::copy(checkpoint_path(*dir_ / "r", 6), to, fs::copy_options::recursive);
    return to;
  }
  static TemporaryDirectory* dir_;
};
TemporaryDirectory* OfARun::dir_ = nullptr;

TEST(Info, OfATokenFile) {
  const TemporaryDirectory dir;
  const std::string path = two_documents(dir);
  const ProgramResult words = run({"info", path});
  ASSERT_EQ(words.code, kExitDone) << words.err;
  EXPECT_NE(words.out.find("document 0   11 tokens: first\\nline\n"), std::string::npos)
      << words.out;
  const Json json = Json::parse(run({"info", path, "--json"}).out);
  EXPECT_EQ(json["kind"], "token file");
  EXPECT_EQ(json["tokens"], 21);
  EXPECT_EQ(json["documents"], 2);
  EXPECT_EQ(json["shortest"], 10);
  EXPECT_EQ(json["longest"], 11);
  EXPECT_EQ(json["pieces"], 1);
  EXPECT_EQ(json["content"][0]["text"], "first\nline");
  EXPECT_EQ(json["content"][1]["text"], "second \xc3\xa9");
  // Half a character is no reason for JSON that cannot be read.
  const Json part =
      Json::parse(run({"info", path, "--json", "--from=1", "--documents=5", "--tokens=8"}).out);
  ASSERT_EQ(part["content"].size(), 1u);
  EXPECT_EQ(part["content"][0]["text"], "second \xef\xbf\xbd");
  EXPECT_EQ(part["content"][0]["tokens"], 10);
  const ProgramResult beyond = run({"info", path, "--from=2"});
  EXPECT_EQ(beyond.code, kExitUsage);
  EXPECT_EQ(beyond.last_line(), "moiety: --from 2: " + path + " has 2 documents");
}

TEST(Info, OfALossMask) {
  const TemporaryDirectory dir;
  const std::string path =
      data::write_masked(dir / "a.tok", {{{'a', 'b', 'c', 'd'}, {0, 0, 1, 1}}, {{'e'}, {0}}});
  const ProgramResult words = run({"info", path});
  ASSERT_EQ(words.code, kExitDone) << words.err;
  for (const char* part : {"targets      2, 40.0 % of the tokens", "4 tokens: {ab}cd\n",
                           "1 token: {e}\n", "1.50 bytes a target"}) {
    EXPECT_NE(words.out.find(part), std::string::npos) << part << " in " << words.out;
  }
  const Json json = Json::parse(run({"info", path, "--json"}).out);
  EXPECT_EQ(json["targets"], 2);
  EXPECT_EQ(json["content"][0]["targets"], (Json{{2, 4}}));
  EXPECT_EQ(json["content"][1]["targets"], Json::array());
}

// A conversation as people see it: special tokens by name, and dimmed what has no loss.
TEST(Info, OfAConversation) {
  const TemporaryDirectory dir;
  const std::string tokenizer = MOIETY_SOURCE_DIR "/tests/golden/tokenizers/smollm2.json";
  dir.write("given/tokenizer.json", Json::parse(read_all(tokenizer))["tokenizer"].dump());
  dir.write("given/tokenizer_config.json", R"({"eos_token": "<|im_end|>"})");
  dir.write("chat.jsonl", "{\"prompt\": \"Hi\", \"completion\": \"the fox\"}\n");
  const ProgramResult made = run({"prepare", "--chat", dir / "chat.jsonl", "--tokenizer",
                                  dir / "given", "--out", dir / "chat", "--quiet"});
  ASSERT_EQ(made.code, kExitDone) << made.err;
  const auto shown = [&](bool color) {
    ShownDocuments how{.color = color};
    how.tokenizer = dir / "given";
    return token_file_info(dir / "chat.tok", how).lines.back().second;
  };
  const std::string question = "<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n";
  const std::string plain = shown(false), dimmed = shown(true);
  EXPECT_NE(plain.find(": {" + question + "}the fox<|im_end|>{\\n}"), plain.npos) << plain;
  EXPECT_NE(dimmed.find(": \x1b[2m" + question + "\x1b[0mthe fox<|im_end|>\x1b[2m\\n\x1b[0m"),
            dimmed.npos)
      << dimmed;
}

TEST_F(OfARun, InfoOfTheRunAndOfACheckpoint) {
  const ProgramResult words = run({"info", *dir_ / "r"});
  ASSERT_EQ(words.code, kExitDone) << words.err;
  for (const char* part :
       {"2 layers of width 32", "4 experts of 32, 2 a token", "of which a token uses",
        "2 ranks (dp 2, ep 2)", "validation", "step-00000003, step-00000006"}) {
    EXPECT_NE(words.out.find(part), std::string::npos) << part << " in " << words.out;
  }
  const Json json = Json::parse(run({"info", *dir_ / "r", "--json"}).out);
  EXPECT_EQ(json["kind"], "run");
  EXPECT_EQ(json["step"], 6);
  EXPECT_EQ(json["last_step"], 6);
  EXPECT_EQ(json["validation_loss"], events(*dir_ / "r", "eval").back()["loss"]);
  EXPECT_EQ(json["checkpoints"].size(), 2u);
  EXPECT_EQ(json["layout"]["ranks"], 2);
  EXPECT_EQ(json["branches"], Json::array());
  EXPECT_GT(json["disk_bytes"], json["disk"]["checkpoints"]);
  // Two of four experts are active in two layers: 3 * 32 * 32 values each.
  EXPECT_EQ(json["parameters"].get<int64_t>() - json["active_parameters"].get<int64_t>(),
            2 * 2 * 3 * 32 * 32);
  const Json checkpoint = Json::parse(run({"info", copy("c"), "--json"}).out);
  EXPECT_EQ(checkpoint["kind"], "checkpoint");
  for (const char* field : {"step", "tokens", "model", "layout", "parameters"}) {
    EXPECT_EQ(checkpoint[field], json[field]) << field;
  }
}

TEST_F(OfARun, BranchesThatLieAsideAreListedAndVerified) {
  const std::string r = *dir_ / "with_branch";
  fs::copy(*dir_ / "r", r, fs::copy_options::recursive);
  fs::create_directory(r + "/checkpoints/branch-1");
  fs::rename(checkpoint_path(r, 6), r + "/checkpoints/branch-1/step-00000006");
  const Json json = Json::parse(run({"info", r, "--json"}).out);
  ASSERT_EQ(json["branches"].size(), 1u);
  EXPECT_EQ(json["branches"][0]["name"], "branch-1");
  EXPECT_EQ(json["step"], 3);
  const ProgramResult verified = run({"verify", r});
  EXPECT_EQ(verified.code, kExitDone) << verified.err;
  EXPECT_NE(verified.out.find("branch-1/step-00000006: good"), std::string::npos) << verified.out;
}

TEST(Info, OfWhatItDoesNotKnow) {
  const TemporaryDirectory dir;
  fs::create_directory(dir / "empty");
  EXPECT_EQ(run({"info", dir / "empty"}).code, kExitData);
  EXPECT_EQ(run({"info", dir / "none"}).last_line(),
            "moiety: " + (dir / "none") + ": no such file or directory");
  EXPECT_EQ(run({"info", "/dev/null"}).code, kExitData);
  EXPECT_EQ(run({"info", dir.write("a.txt", "text")}).code, kExitData);
  EXPECT_EQ(run({"verify", dir / "empty"}).code, kExitData);
  EXPECT_EQ(run({"repair", dir / "empty"}).code, kExitData);
}

TEST(VerifyCommand, NamesTheDamagedPieceOfATokenFile) {
  const TemporaryDirectory dir;
  const std::string path = data::write_hole(dir / "a.tok", 150'000'000);
  const ProgramResult good = run({"verify", path, "--json"});
  ASSERT_EQ(good.code, kExitDone) << good.err;
  EXPECT_EQ(Json::parse(good.out)["good"], true);
  EXPECT_EQ(Json::parse(good.out)["tokens"], 150'000'000);
  data::flip_bit(path, 4096 + 5 * data::kPieceBytes + 77);
  const ProgramResult bad = run({"verify", path});
  EXPECT_EQ(bad.code, kExitData);
  EXPECT_NE(bad.last_line().find(path + ": the tokens are damaged: bytes [83890176, 100667392)"),
            std::string::npos)
      << bad.err;
}

// Within the first pass over the piece, however short the run is.
TEST(VerifyCommand, TrainingAndEvaluationRefuseTheDamagedFileToo) {
  const TemporaryDirectory dir;
  const std::string path = data::write_hole(dir / "a.tok", 150'000'000);
  data::flip_bit(path, 4096 + 77);
  const Arguments data{"--data.synthetic=none", "--data.train=" + path, "--data.shuffle=false",
                       "--train.steps=2"};
  const ProgramResult result = run(tiny(dir / "r") + data);
  EXPECT_EQ(result.code, kExitData);
  EXPECT_NE(result.last_line().find(path + ": the tokens are damaged: bytes [4096, 16781312)"),
            std::string::npos)
      << result.err;
  train(tiny(dir / "good"));
  const ProgramResult eval = run({"eval", dir / "good", "--data", path, "--samples=2"});
  EXPECT_EQ(eval.code, kExitData);
  EXPECT_EQ(eval.out, "");
  // A run that does not come to the piece is none the worse.
  data::flip_bit(path, 4096 + 77);
  data::flip_bit(path, 4096 + 9 * data::kPieceBytes);
  EXPECT_EQ(run(tiny(dir / "s") + data).code, kExitDone);
}

TEST_F(OfARun, VerifyEndsWithFive) {
  const std::string c = copy("damaged"), file = c + "/rank-00001-of-00002.safetensors";
  EXPECT_EQ(run({"verify", c}).code, kExitDone);
  data::flip_bit(file, fs::file_size(file) - 3);
  const ProgramResult result = run({"verify", text_file(), c, "--json"});
  EXPECT_EQ(result.code, kExitCheckpoint);
  EXPECT_NE(result.last_line().find(file + ": "), std::string::npos) << result.err;
  EXPECT_EQ(std::count(result.out.begin(), result.out.end(), '\n'), 2);
  EXPECT_EQ(Json::parse(result.out.substr(result.out.find('\n')))["good"], false);
}

TEST_F(OfARun, RepairMakesALostManifestAgain) {
  const std::string c = copy("lost");
  const std::string manifest = read_all(c + "/manifest.json");
  EXPECT_EQ(Json::parse(run({"repair", c, "--json"}).out)["repair"], "none");
  fs::remove(c + "/manifest.json");
  EXPECT_EQ(run({"generate", c, "--tokens=1"}).code, kExitCheckpoint);
  EXPECT_EQ(Json::parse(run({"repair", c, "--json"}).out)["repair"], "proved");
  EXPECT_EQ(read_all(c + "/manifest.json"), manifest);
  EXPECT_EQ(run({"generate", c, "--tokens=1"}).code, kExitDone);
  fs::remove(c + "/manifest.json");
  fs::remove(c + "/rank-00001-of-00002.safetensors");
  EXPECT_EQ(run({"repair", c}).code, kExitCheckpoint);
  EXPECT_FALSE(fs::exists(c + "/manifest.json"));
}

}  // namespace
}  // namespace moiety::app
