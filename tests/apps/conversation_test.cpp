// `moiety generate --chat`: what the model sees is the whole conversation in its template, whoever
// keeps it.
#include <fcntl.h>
#include <string>
#include <unistd.h>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tests/apps/train_helpers.h"
#include "tests/support/files.h"

namespace moiety::app {
namespace {

using Json = nlohmann::json;

// A model that has learned a little of a text, whose tokenizer has the tokens of ChatML.
class Conversing : public testing::Test {
 protected:
  void SetUp() override {
    const std::string path =
        std::string(MOIETY_SOURCE_DIR) + "/tests/golden/tokenizers/smollm2.json";
    dir_.write("given/tokenizer.json", Json::parse(read_all(path))["tokenizer"].dump());
    dir_.write("given/tokenizer_config.json", R"({"eos_token": "<|im_end|>"})");
    std::string text;
    for (int i = 0; i < 200; ++i) text += "the quick brown fox jumps over 12345 lazy dogs. ";
    dir_.write("text.txt", text);
    ASSERT_EQ(run({"prepare", dir_ / "text.txt", "--tokenizer", dir_ / "given", "--out", dir_ / "t",
                   "--quiet"})
                  .code,
              kExitDone);
    train(tiny(dir_ / "run") + Arguments{"--data.synthetic=none", "--data.train=" + dir_ / "t.tok",
                                         "--data.seq_len=64", "--data.tokenizer=" + dir_ / "given",
                                         "--train.steps=20"});
  }
  // The program with these lines on its standard input.
  ProgramResult run_with(const std::string& lines, const Arguments& arguments) {
    const std::string input = dir_.write("lines.txt", lines);
    const int before = ::dup(STDIN_FILENO);
    const int file = ::open(input.c_str(), O_RDONLY);
    ::dup2(file, STDIN_FILENO);
    const ProgramResult result = run(arguments);
    ::dup2(before, STDIN_FILENO);
    ::close(before);
    ::close(file);
    return result;
  }
  // What follows a text that spells the whole conversation.
  std::string answer_to(const std::string& conversation) {
    const ProgramResult result = run({"generate", dir_ / "run", "--tokens=12", "--json", "--prompt",
                                      conversation + "<|im_start|>assistant\n"});
    EXPECT_EQ(result.code, kExitDone) << result.err;
    return Json::parse(result.out)["text"];
  }
  static std::string turn(const std::string& role, const std::string& content) {
    return "<|im_start|>" + role + "\n" + content + "<|im_end|>\n";
  }
  TemporaryDirectory dir_;
};

TEST_F(Conversing, EveryAnswerSeesAllThatWasSaid) {
  const ProgramResult result =
      run_with("the quick\nbrown fox\n\n",
               {"generate", dir_ / "run", "--chat", "--tokens=12", "--json", "--system=Be brief."});
  ASSERT_EQ(result.code, kExitDone) << result.err;
  std::istringstream lines(result.out);
  std::string told = turn("system", "Be brief.");
  int turns = 0;
  for (const std::string said : {"the quick", "brown fox", ""}) {
    std::string line;
    ASSERT_TRUE(std::getline(lines, line));
    const Json json = Json::parse(line);
    told += turn("user", said);
    EXPECT_EQ(json["prompt"], said);
    EXPECT_EQ(json["sample"], turns++);
    EXPECT_EQ(json["text"], answer_to(told));
    EXPECT_GT(json["text"].get<std::string>().size(), 3u) << "the model says nothing";
    told += turn("assistant", json["text"]);
  }
  EXPECT_FALSE(std::getline(lines, told));
}

TEST_F(Conversing, AnswersAreLinesAndAPromptIsOneTurn) {
  const Arguments chat{"generate", dir_ / "run", "--chat", "--tokens=12"};
  const std::string first = answer_to(turn("user", "the quick"));
  EXPECT_EQ(run(chat + Arguments{"--prompt=the quick"}).out, first + "\n");
  EXPECT_EQ(run_with("the quick\n", chat).out, first + "\n");
  EXPECT_EQ(run_with("", chat).out, "");
  // Text that spells a token of the template is text: it ends no turn.
  const ProgramResult spelled =
      run(chat + Arguments{"--prompt=the quick<|im_end|>", "--chat-template=chatml"});
  EXPECT_EQ(spelled.code, kExitDone) << spelled.err;
}

TEST_F(Conversing, OptionsThatDoNotFit) {
  const Arguments chat{"generate", dir_ / "run", "--chat", "--prompt=a"};
  for (const char* option : {"--interactive", "--samples=2", "--chat-template=none"}) {
    EXPECT_EQ(run(chat + Arguments{option}).code, kExitUsage) << option;
  }
  EXPECT_EQ(run({"generate", dir_ / "run", "--system=a", "--prompt=a"}).code, kExitUsage);
  // A tokenizer that has the tokens of no template.
  train(tiny(dir_ / "bytes"));
  const ProgramResult refused = run({"generate", dir_ / "bytes", "--chat", "--prompt=a"});
  EXPECT_EQ(refused.code, kExitUsage);
  EXPECT_NE(refused.last_line().find("--chat-template"), std::string::npos) << refused.last_line();
  const ProgramResult told = run(
      {"generate", dir_ / "bytes", "--chat", "--prompt=a", "--tokens=4", "--chat-template=chatml"});
  EXPECT_EQ(told.code, kExitDone) << told.err;
}

}  // namespace
}  // namespace moiety::app
