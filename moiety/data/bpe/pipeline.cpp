#include "moiety/data/bpe/pipeline.h"

#include <algorithm>

#include "moiety/base/error.h"
#include "moiety/data/documents.h"

namespace moiety::data::bpe {
namespace {

constexpr std::string_view kMark = "\xe2\x96\x81";
constexpr size_t kLongestText = size_t{1} << 30;  // bytes; places in a word are 32 bits

AddedTokens tokens_of(const Spec& spec, bool normalized, const Normalizer& normalizer) {
  std::vector<AddedToken> tokens;
  std::vector<std::string> texts;
  Normalizer::Run normalize(normalizer);
  for (const AddedToken& token : spec.added) {
    if (token.normalized != normalized) continue;
    tokens.push_back(token);
    texts.push_back(token.content);
    if (normalized) normalize(texts.back());
  }
  return {std::move(tokens), texts};
}

}  // namespace

// What one thread needs to encode.
struct Pipeline::Worker {
  explicit Worker(const Pipeline& p)
      : normalize(p.normalizer_), raw(p.raw_), normalized(p.normalized_), split(p.splitter_) {}

  Normalizer::Run normalize;
  AddedTokens::Run raw, normalized;
  Splitter::Run split;
  Model::Scratch scratch;
  std::vector<Part> parts, inner;
  std::string text;
};

Pipeline::Pipeline(const Spec& spec, const std::string& file)
    : file_(file),
      normalizer_(spec.normal),
      raw_(tokens_of(spec, false, normalizer_)),
      normalized_(tokens_of(spec, true, normalizer_)),
      splitter_(spec.split, file),
      model_(spec, file),
      decoder_(spec.decode) {
  vocab_ = spec.vocab.back().first + 1;
  if (!spec.added.empty()) vocab_ = std::max(vocab_, spec.added.back().id + 1);
  for (const auto& list : {spec.before, spec.after}) {
    for (const uint32_t id : list) {
      if (id >= vocab_) throw DataError("{}: post_processor: the id {} does not exist", file, id);
    }
  }
  spellings_.resize(vocab_);
  Normalizer::Run normalize(normalizer_);
  is_text_.assign(vocab_, 0);
  for (const auto& [id, token] : spec.vocab) {
    tokens_.emplace(token, id);
    spellings_[id] = token;
    is_text_[id] = 1;
  }
  for (const AddedToken& token : spec.added) {
    tokens_.emplace(token.content, token.id);
    spellings_[token.id] = token.content;
    // What was looked for is what comes back.
    if (token.normalized) normalize(spellings_[token.id]);
    is_text_[token.id] = !token.special;
  }
}

Pipeline::~Pipeline() = default;

std::optional<uint32_t> Pipeline::find(const std::string& token) const {
  const auto it = tokens_.find(token);
  return it == tokens_.end() ? std::nullopt : std::optional(it->second);
}

const AddedToken* Pipeline::find_added(std::string_view token) const {
  const AddedToken* found = raw_.find(token);
  return found ? found : normalized_.find(token);
}

const std::string* Pipeline::spelling(uint32_t id) const {
  return id < vocab_ && is_text_[id] ? &spellings_[id] : nullptr;
}

const std::string* Pipeline::special(uint32_t id) const {
  return id < vocab_ && !is_text_[id] && !spellings_[id].empty() ? &spellings_[id] : nullptr;
}

// Workers are kept for the words that they have met.
std::unique_ptr<Pipeline::Worker> Pipeline::hire() const {
  const std::lock_guard lock(mutex_);
  if (idle_.empty()) return std::make_unique<Worker>(*this);
  std::unique_ptr<Worker> worker = std::move(idle_.back());
  idle_.pop_back();
  return worker;
}

void Pipeline::encode(std::string_view text, bool special, std::vector<uint32_t>& ids,
                      bool is_start) const {
  if (text.size() > kLongestText) {
    throw DataError("{}: a text of {} bytes is too long; the longest is {}", file_, text.size(),
                    kLongestText);
  }
  if (const size_t bad = find_bad_utf8(text); bad != text.npos) {
    throw DataError("{}: byte {} of a text is not UTF-8", file_, bad);
  }
  std::unique_ptr<Worker> worker = hire();
  worker->parts.clear();
  worker->raw(text, special, worker->parts);
  for (const Part& part : worker->parts) {
    if (part.id) {
      ids.push_back(*part.id);
      continue;
    }
    const bool is_first = is_start && part.text.data() == text.data();
    std::string_view normal = part.text;
    if (!normalizer_.empty()) {
      worker->text.assign(part.text);
      worker->normalize(worker->text);
      normal = worker->text;
    }
    worker->inner.clear();
    worker->normalized(normal, special, worker->inner);
    for (const Part& inner : worker->inner) {
      if (inner.id) {
        ids.push_back(*inner.id);
      } else {
        encode_part(inner.text, is_first && inner.text.data() == normal.data(), *worker, ids);
      }
    }
  }
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(worker));
}

// Cuts words before marks where that changes no id, so that they are short, and met again.
void Pipeline::encode_part(std::string_view text, bool is_start, Worker& worker,
                           std::vector<uint32_t>& ids) const {
  for (std::string_view word : worker.split(text, is_start)) {
    if (model_.may_cut_at_marks()) {
      size_t begin = 0;
      for (size_t at = word.find(kMark); at != word.npos;
           at = word.find(kMark, at + kMark.size())) {
        if (at == begin || word.substr(0, at).ends_with(kMark)) continue;
        model_.encode(word.substr(begin, at - begin), worker.scratch, ids);
        begin = at;
      }
      word.remove_prefix(begin);
    }
    model_.encode(word, worker.scratch, ids);
  }
}

}  // namespace moiety::data::bpe
