// The continuation of texts by a model.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "apps/moiety/commands/token_choice.h"
#include "moiety/data/tokenizer.h"
#include "moiety/train/inference_model.h"

namespace moiety::app {

struct GenerationRules {
  ChoiceRules choice;
  int64_t tokens = 128;            // the most that are made
  std::vector<std::string> stops;  // texts that end a continuation, and are no part of it
  std::vector<uint32_t> ends;      // ids that do so, beside eos
};

struct Continuation {
  std::string text;
  int64_t tokens = 0;  // made, without the one that ends a document
  const char* end =
      "tokens";  // "eos" (or another of the ends), "stop", or "tokens": there were enough
};

class TextGenerator {
 public:
  // `pass_tokens` is the most that the model was made for; `trained_length` that of the sequences on
  // which it was trained, beyond which it is a guess: the first time that is a warning.
  TextGenerator(train::InferenceModel& model, const data::Tokenizer& tokenizer,
                const GenerationRules& rules, int64_t pass_tokens, int64_t trained_length,
                const Stream& stream);
  ~TextGenerator();

  // Continues a prompt; without one a new document begins. The text goes to `say` as it comes. Each
  // `sample` has random numbers of its own.
  Continuation run(const std::string& prompt, uint32_t sample,
                   const std::function<void(std::string_view)>& say);
  // Continues tokens, at least one. If they begin with those of the answer before and its context,
  // only the rest is computed.
  Continuation answer(const std::vector<int32_t>& context, uint32_t sample,
                      const std::function<void(std::string_view)>& say);

 private:
  class Sequence;
  void make_room(const std::vector<int32_t>& context, int64_t positions);
  Continuation continue_tokens(const std::vector<int32_t>& context, uint32_t sample,
                               const std::function<void(std::string_view)>& say);
  void warn_of_length(int64_t positions);

  train::InferenceModel& model_;
  const data::Tokenizer& tokenizer_;
  const GenerationRules& rules_;
  TokenChoice choice_;
  int64_t pass_tokens_, trained_length_;
  const Stream& stream_;
  std::unique_ptr<Sequence> sequence_;
  bool warned_ = false;
};

// The tokens of a prompt, at least one, behind those that the tokenizer puts before a text. Throws
// UsageError if there is nothing to begin with.
std::vector<int32_t> prompt_tokens(const data::Tokenizer& tokenizer, const std::string& prompt);

}  // namespace moiety::app
