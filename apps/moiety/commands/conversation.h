// A conversation with a model: what was said so far, and the next answer.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "apps/moiety/commands/text_generator.h"
#include "moiety/data/chat.h"

namespace moiety::app {

// The template that is given, or the one whose tokens the tokenizer has. UsageError if it has none.
data::ChatTemplate chat_template_of(const data::Tokenizer& tokenizer,
                                    std::optional<data::ChatTemplate> given);

// Makes an answer end where the template ends one.
void end_answers(const data::ChatRenderer& renderer, const data::Tokenizer& tokenizer,
                 GenerationRules& rules);

class Conversation {
 public:
  // `system` is what the model is told before all else; empty: nothing.
  Conversation(TextGenerator& generator, const data::ChatRenderer& renderer,
               const std::string& system);

  // The answer to what the user says, which goes to `show` as it comes. Both are remembered.
  Continuation say(const std::string& text, const std::function<void(std::string_view)>& show);

 private:
  TextGenerator& generator_;
  const data::ChatRenderer& renderer_;
  std::vector<data::ChatMessage> messages_;
  uint32_t turns_ = 0;
};

}  // namespace moiety::app
