#include "apps/moiety/commands/text_generator.h"

#include <algorithm>
#include <cmath>

#include "apps/moiety/commands/stop_text.h"
#include "moiety/base/copy.h"
#include "moiety/base/error.h"
#include "moiety/base/log.h"
#include "moiety/data/utf8_stream.h"
#include "moiety/model/decoder.h"

namespace moiety::app {
namespace {

void check_finite(std::span<const float> logits) {
  if (std::all_of(logits.begin(), logits.end(), [](float x) { return std::isfinite(x); })) return;
  throw NumericalError("generate: the model gives logits that are not finite");
}

}  // namespace

// One sequence, whose logits come to the host.
class TextGenerator::Sequence {
 public:
  Sequence(train::InferenceModel& model, int64_t positions, int64_t pass_tokens, uint32_t vocab,
           const Stream& stream)
      : positions_(positions),
        decoder_(model.transformer(), 1, positions),
        pass_tokens_(size_t(pass_tokens)),
        vocab_(vocab),
        stream_(stream),
        arena_("activations", stream.device()),
        logits_PV_(DType::kFloat32, {1, model.transformer().config().vocab}, stream.device(),
                   "logits"),
        on_host_(DType::kFloat32, {1, model.transformer().config().vocab}, "logits") {}

  // The logits behind the tokens, of the tokenizer's vocabulary: a model's may be larger, to have a
  // suitable size.
  std::span<const float> append(std::span<const int32_t> tokens) {
    seen_.insert(seen_.end(), tokens.begin(), tokens.end());
    for (; tokens.size() > pass_tokens_; tokens = tokens.subspan(pass_tokens_)) {
      pass(tokens.first(pass_tokens_));
    }
    pass(tokens);
    copy(on_host_, logits_PV_, stream_);
    stream_.synchronize();
    const std::span<const float> logits(on_host_.data<float>(), vocab_);
    check_finite(logits);
    return logits;
  }

  int64_t positions() const { return positions_; }
  const std::vector<int32_t>& seen() const { return seen_; }

 private:
  void pass(std::span<const int32_t> tokens) {
    decoder_.append(std::vector<model::Decoder::Continuation>{{0, tokens}}, logits_PV_, arena_,
                    stream_);
  }

  int64_t positions_;
  model::Decoder decoder_;
  size_t pass_tokens_;
  uint32_t vocab_;
  const Stream& stream_;
  Arena arena_;
  Tensor logits_PV_, on_host_;
  std::vector<int32_t> seen_;
};

TextGenerator::TextGenerator(train::InferenceModel& model, const data::Tokenizer& tokenizer,
                             const GenerationRules& rules, int64_t pass_tokens,
                             int64_t trained_length, const Stream& stream)
    : model_(model),
      tokenizer_(tokenizer),
      rules_(rules),
      choice_(rules.choice),
      pass_tokens_(pass_tokens),
      trained_length_(trained_length),
      stream_(stream) {}

TextGenerator::~TextGenerator() = default;

std::vector<int32_t> prompt_tokens(const data::Tokenizer& tokenizer, const std::string& prompt) {
  std::vector<uint32_t> ids;
  ids.assign(tokenizer.before().begin(), tokenizer.before().end());
  tokenizer.encode(prompt, ids, true);
  if (ids.empty()) ids.push_back(tokenizer.eos());  // as before a document
  if (ids.back() == data::Tokenizer::kNoToken) {
    throw UsageError("generate: an empty prompt, and the tokenizer {} has no eos to begin with",
                     tokenizer.name());
  }
  return {ids.begin(), ids.end()};
}

void TextGenerator::warn_of_length(int64_t positions) {
  if (positions <= trained_length_ || warned_) return;
  warned_ = true;
  log(LogLevel::kWarning,
      "generate: up to {} tokens with the prompt; the model was trained on {}, and what comes "
      "behind may be worse",
      positions, trained_length_);
}

// A sequence with so many positions, which has seen a part of the context or nothing.
void TextGenerator::make_room(const std::vector<int32_t>& context, int64_t positions) {
  if (sequence_ && sequence_->positions() >= positions) {
    const std::vector<int32_t>& seen = sequence_->seen();
    if (seen.size() < context.size() && std::equal(seen.begin(), seen.end(), context.begin())) {
      return;
    }
  }
  const int64_t most = std::max(positions, sequence_ ? sequence_->positions() : 0);
  sequence_.reset();
  sequence_ = std::make_unique<Sequence>(model_, most, pass_tokens_, tokenizer_.vocab(), stream_);
}

Continuation TextGenerator::run(const std::string& prompt, uint32_t sample,
                                const std::function<void(std::string_view)>& say) {
  const std::vector<int32_t> context = prompt_tokens(tokenizer_, prompt);
  const int64_t positions = int64_t(context.size()) + rules_.tokens;
  warn_of_length(positions);
  sequence_.reset();
  make_room(context, positions);
  return continue_tokens(context, sample, say);
}

Continuation TextGenerator::answer(const std::vector<int32_t>& context, uint32_t sample,
                                   const std::function<void(std::string_view)>& say) {
  const int64_t positions = int64_t(context.size()) + rules_.tokens;
  warn_of_length(positions);
  const bool fits = sequence_ && sequence_->positions() >= positions;
  make_room(context, fits ? positions : std::max(2 * positions, trained_length_));
  return continue_tokens(context, sample, say);
}

Continuation TextGenerator::continue_tokens(const std::vector<int32_t>& context, uint32_t sample,
                                            const std::function<void(std::string_view)>& say) {
  const auto is_end = [&](int32_t id) {
    return uint32_t(id) == tokenizer_.eos() || std::ranges::count(rules_.ends, uint32_t(id)) > 0;
  };
  std::vector<int32_t> fresh(context.begin() + int64_t(sequence_->seen().size()), context.end());
  StopText stop(rules_.stops);
  Continuation out;
  data::TokenStream decoder(tokenizer_);
  for (const int32_t id : context) decoder.add(id);  // what follows may depend on it
  data::Utf8Stream characters;
  const auto show = [&](const std::string& text) {
    out.text += text;
    if (!text.empty()) say(text);
  };
  for (; out.tokens < rules_.tokens; ++out.tokens) {
    const int32_t next = choice_.choose(sequence_->append(fresh), uint32_t(out.tokens), sample);
    if (is_end(next)) {
      out.end = "eos";
      break;
    }
    fresh = {next};
    show(stop.add(characters.add(decoder.add(next))));
    if (stop.met()) {
      ++out.tokens;
      out.end = "stop";
      break;
    }
  }
  if (!stop.met()) show(stop.add(characters.rest()));
  show(stop.rest());
  return out;
}

}  // namespace moiety::app
