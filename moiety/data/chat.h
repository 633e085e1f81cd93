// Conversations as tokens: the chat templates that are built in, and which tokens are targets.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "moiety/data/tokenizer.h"

namespace moiety::data {

// What stands around messages (docs/data.md#conversations).
enum class ChatTemplate {
  kChatml,   // <|im_start|>ROLE\nCONTENT<|im_end|>\n; Qwen, SmolLM2 and many more
  kMistral,  // <s> [INST] CONTENT [/INST] CONTENT</s>; Mistral and Mixtral
  kLlama3,   // <|start_header_id|>ROLE<|end_header_id|>\n\nCONTENT<|eot_id|>; content is trimmed
};

struct ChatMessage {
  std::string role;  // system, user, assistant or tool
  std::string content;
};

struct ChatTokens {
  std::vector<uint32_t> ids;
  std::vector<uint8_t> targets;  // 1: a token of an assistant's message, or the one that ends it
  uint64_t target_bytes = 0;     // of the assistant's messages
};

// The messages of a JSON object of a conversation: "messages", each with role and content, or
// "prompt" and "completion". DataError says what is wrong.
std::vector<ChatMessage> parse_chat(std::string_view json);

// Renders conversations for one tokenizer, which outlives it. Ids and targets are those of
// transformers' apply_chat_template with the same template (docs/adr/0026), but for messages that
// spell special tokens: in ours a message is always text. For several threads.
class ChatRenderer {
 public:
  // Throws UsageError if the template needs an end of text that the tokenizer has not, and
  // Error(kUnsupported) if a token of the template takes the spaces around it.
  ChatRenderer(const Tokenizer& tokenizer, ChatTemplate kind);

  // `prompts`: what makes the model answer stands at the end. Throws DataError for a conversation
  // that the template has no place for.
  ChatTokens render(std::span<const ChatMessage> messages, bool prompts = false) const;
  // The ids in which an assistant's message ends: what generation stops at.
  std::span<const uint32_t> end() const { return end_; }
  // Tokens of the template that the tokenizer has not: they are spelled as text.
  std::vector<std::string> spelled() const;

 private:
  class Writer;
  struct Marker {
    std::string text;
    uint32_t id = Tokenizer::kNoToken;
  };
  Marker marker(std::string_view text) const;
  void write_tagged(std::span<const ChatMessage> messages, bool prompts, Writer& out) const;
  void write_mistral(std::span<const ChatMessage> messages, Writer& out) const;

  const Tokenizer& tokenizer_;
  ChatTemplate kind_;
  Marker begin_, role_end_, content_end_;  // of a message
  std::vector<uint32_t> end_;
};

}  // namespace moiety::data
