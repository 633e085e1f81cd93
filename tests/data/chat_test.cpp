// Conversations against transformers' apply_chat_template: stored
// (tests/data/tokenizers/make_chat_golden.py), and live where the package is installed.
#include "moiety/data/chat.h"

#include <cstdlib>
#include <map>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "moiety/base/error.h"
#include "tests/support/error_of.h"
#include "tests/support/files.h"
#include "tests/support/python.h"

namespace moiety::data {
namespace {

using nlohmann::json;

const std::map<std::string, ChatTemplate> kTemplates{{"chatml", ChatTemplate::kChatml},
                                                     {"mistral", ChatTemplate::kMistral},
                                                     {"llama3", ChatTemplate::kLlama3}};

Tokenizer tokenizer_of(const json& kind) {
  const std::string name = kind["tokenizer"];
  json tokenizer = json::parse(
      read_all(MOIETY_SOURCE_DIR "/tests/golden/tokenizers/" + name + ".json"))["tokenizer"];
  json& added = tokenizer["added_tokens"];
  for (const json& text : kind["added"]) {
    added.push_back({{"id", added.back()["id"].get<int>() + 1},
                     {"content", text},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false},
                     {"special", true}});
  }
  const json config{{"bos_token", kind["bos"]}, {"eos_token", kind["eos"]}};
  return Tokenizer::of_files("tokenizer.json", {{"tokenizer.json", tokenizer.dump()},
                                                {"tokenizer_config.json", config.dump()}});
}

std::vector<ChatMessage> messages_of(const json& list) {
  std::vector<ChatMessage> messages;
  for (const json& m : list) messages.push_back({m["role"], m["content"]});
  return messages;
}

// Returns the number of conversations whose targets were compared too.
int compare(const json& kinds) {
  int compared = 0;
  for (const json& kind : kinds) {
    const Tokenizer tokenizer = tokenizer_of(kind);
    const ChatRenderer renderer(tokenizer, kTemplates.at(kind["template"]));
    EXPECT_TRUE(renderer.spelled().empty());
    for (const json& c : kind["cases"]) {
      SCOPED_TRACE(kind["name"].get<std::string>() + ": " + c["messages"].dump());
      const ChatTokens got = renderer.render(messages_of(c["messages"]), c["prompts"]);
      EXPECT_EQ(got.ids, c["ids"].get<std::vector<uint32_t>>());
      EXPECT_EQ(got.targets.size(), got.ids.size());
      if (!c.contains("targets")) continue;
      EXPECT_EQ(got.targets, c["targets"].get<std::vector<uint8_t>>());
      ++compared;
    }
  }
  return compared;
}

TEST(Chat, IdsAndTargetsAreThoseOfTransformers) {
  EXPECT_GT(compare(json::parse(read_all(MOIETY_SOURCE_DIR "/tests/golden/chat.json"))), 90);
}

TEST(Chat, LiveAgainstTransformers) {
  const std::string python = find_python({"transformers", "jinja2"});
  if (python.empty()) GTEST_SKIP() << "no Python with transformers and jinja2";
  const TemporaryDirectory dir;
  const std::string command = "'" + python +
                              "' " MOIETY_SOURCE_DIR
                              "/tests/data/tokenizers/make_chat_golden.py --random 60 --seed 7 "
                              "--out '" +
                              dir / "chat.json" + "' 2>'" + dir / "log" + "'";
  ASSERT_EQ(std::system(command.c_str()), 0) << read_all(dir / "log");
  EXPECT_GT(compare(json::parse(read_all(dir / "chat.json"))), 100);
}

const Tokenizer& bytes() {
  static const Tokenizer tokenizer = Tokenizer::load("bytes");
  return tokenizer;
}

std::string text_of(const ChatTokens& tokens, bool targets) {
  std::string out;
  for (size_t i = 0; i < tokens.ids.size(); ++i) {
    if (tokens.targets[i] == targets) out += static_cast<char>(tokens.ids[i]);
  }
  return out;
}

// A tokenizer without the template's tokens spells them.
TEST(Chat, SpelledTokens) {
  const ChatRenderer renderer(bytes(), ChatTemplate::kChatml);
  EXPECT_EQ(renderer.spelled(), (std::vector<std::string>{"<|im_start|>", "<|im_end|>"}));
  EXPECT_EQ(renderer.end().size(), 10u);
  const ChatTokens got = renderer.render(
      std::vector<ChatMessage>{{"user", "a"}, {"assistant", "b"}, {"user", ""}, {"assistant", ""}},
      true);
  EXPECT_EQ(text_of(got, true), "b<|im_end|><|im_end|>");
  EXPECT_EQ(text_of(got, false),
            "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n\n<|im_start|>user\n<|im_end|>\n"
            "<|im_start|>assistant\n\n<|im_start|>assistant\n");
  EXPECT_EQ(got.target_bytes, 1u);
}

TEST(Chat, RolesOutOfTurn) {
  const ChatRenderer renderer(bytes(), ChatTemplate::kMistral);
  const auto error = [&](const std::vector<ChatMessage>& messages) {
    return kind_and_error_of([&] { renderer.render(messages); });
  };
  EXPECT_EQ(error({{"system", "a"}, {"assistant", "b"}}),
            "data: message 2: the role is 'assistant'; behind the system's, if there is one, the "
            "template mistral has user and assistant in turn");
  EXPECT_NE(error({{"user", "a"}, {"user", "b"}}).find("message 2: the role is 'user'"),
            std::string::npos);
}

TEST(Chat, BadConversations) {
  const auto error = [](const char* line) { return kind_and_error_of([&] { parse_chat(line); }); };
  EXPECT_EQ(parse_chat(R"({"prompt": "p", "completion": "c"})")[1].content, "c");
  EXPECT_EQ(parse_chat(R"({"messages": [{"role": "user", "content": "x"}]})")[0].role, "user");
  EXPECT_EQ(error("[]"),
            "data: the conversation: no key 'messages', and not both 'prompt' and 'completion'");
  EXPECT_EQ(error(R"({"messages": 3})"),
            "data: the conversation: 'messages' is a JSON number, not a list");
  EXPECT_EQ(error(R"({"messages": []})"), "data: the conversation: 'messages' is empty");
  EXPECT_EQ(error(R"({"messages": [{"role": "user"}]})"), "data: message 1: no key 'content'");
  EXPECT_EQ(error(R"({"messages": [{"role": "user", "content": null}]})"),
            "data: message 1: 'content' is a JSON null, not a string");
  EXPECT_EQ(error(R"({"messages": [{"role": "human", "content": ""}]})"),
            "data: message 1: the role 'human' is none of system, user, assistant, tool");
}

}  // namespace
}  // namespace moiety::data
