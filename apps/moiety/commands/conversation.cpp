#include "apps/moiety/commands/conversation.h"

#include "moiety/base/error.h"

namespace moiety::app {
data::ChatTemplate chat_template_of(const data::Tokenizer& tokenizer,
                                    std::optional<data::ChatTemplate> given) {
  const auto has = [&](std::string_view token) {
    return tokenizer.find_added(token) != data::Tokenizer::kNoToken;
  };
  if (given) return *given;
  if (has("<|im_start|>")) return data::ChatTemplate::kChatml;
  if (has("<|start_header_id|>")) return data::ChatTemplate::kLlama3;
  throw UsageError(
      "--chat: the tokenizer {} has neither <|im_start|> nor <|start_header_id|>: --chat-template "
      "says which template the model was trained with",
      tokenizer.name());
}

void end_answers(const data::ChatRenderer& renderer, const data::Tokenizer& tokenizer,
                 GenerationRules& rules) {
  const std::span<const uint32_t> end = renderer.end();
  if (end.size() == 1) {
    rules.ends.push_back(end[0]);
  } else {
    rules.stops.push_back(tokenizer.decode(std::vector<int32_t>(end.begin(), end.end())));
  }
}

Conversation::Conversation(TextGenerator& generator, const data::ChatRenderer& renderer,
                           const std::string& system)
    : generator_(generator), renderer_(renderer) {
  if (!system.empty()) messages_.push_back({"system", system});
}

Continuation Conversation::say(const std::string& text,
                               const std::function<void(std::string_view)>& show) {
  messages_.push_back({"user", text});
  const data::ChatTokens context = renderer_.render(messages_, true);
  Continuation answer = generator_.answer({context.ids.begin(), context.ids.end()}, turns_++, show);
  messages_.push_back({"assistant", answer.text});
  return answer;
}

}  // namespace moiety::app
