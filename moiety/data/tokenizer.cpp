#include "moiety/data/tokenizer.h"

#include "moiety/base/error.h"
#include "moiety/data/bpe/normalize.h"
#include "moiety/data/bpe/regex.h"
#include "moiety/data/token_file.h"
#include "moiety/data/tokenizer_bpe.h"

namespace moiety::data {

Tokenizer Tokenizer::of_files(std::string_view name, std::vector<TokenizerFile> files) {
  Tokenizer t;
  t.name_ = name;
  t.bpe_ = std::make_shared<const Bpe>(std::string(name), std::move(files));
  t.vocab_ = t.bpe_->pipeline.vocab();
  t.before_ = t.bpe_->before;
  t.eos_ = t.bpe_->eos;
  t.bos_ = t.bpe_->bos;
  t.pad_ = t.bpe_->pad;
  t.identity_ = sha256(t.bpe_->canonical + text("eos={} bos={}\n", t.eos_, t.bos_));
  return t;
}

Tokenizer Tokenizer::of_token_file(std::string_view path) {
  const TokenFileHeader h = TokenFile::open(std::string(path))->header();
  Tokenizer t;
  t.name_ = path;
  t.vocab_ = h.vocab;
  t.eos_ = h.eos;
  t.bos_ = h.bos;
  t.identity_ = h.tokenizer;
  t.has_text_ = false;
  return t;
}

void Tokenizer::require_text() const {
  if (has_text_) return;
  fail(ErrorKind::kUnsupported,
       "tokenizer {}: a token file knows ids and no text; a tokenizer.json is needed", name_);
}

std::span<const TokenizerFile> Tokenizer::files() const {
  return bpe_ ? std::span(bpe_->files) : std::span<const TokenizerFile>();
}

void Tokenizer::encode(std::string_view text, std::vector<uint32_t>& ids, bool special) const {
  require_text();
  if (bpe_) return bpe_->pipeline.encode(text, special, ids);
  const size_t begin = ids.size();
  ids.resize(begin + text.size());
  for (size_t i = 0; i < text.size(); ++i) ids[begin + i] = static_cast<unsigned char>(text[i]);
}

void Tokenizer::encode_part(std::string_view text, bool is_start,
                            std::vector<uint32_t>& ids) const {
  if (bpe_) return bpe_->pipeline.encode(text, false, ids, is_start);
  encode(text, ids);
}

uint32_t Tokenizer::find_added(std::string_view token) const {
  const bpe::AddedToken* found = bpe_ ? bpe_->pipeline.find_added(token) : nullptr;
  if (!found) return kNoToken;
  if (found->lstrip || found->rstrip || found->single_word) {
    fail(ErrorKind::kUnsupported, "tokenizer {}: {} has {}, which a chat template does without",
         name_, token,
         found->single_word ? "single_word"
         : found->lstrip    ? "lstrip"
                            : "rstrip");
  }
  return found->id;
}

std::string Tokenizer::decode(std::span<const int32_t> ids) const {
  TokenStream stream(*this);
  std::string bytes;
  for (const int32_t id : ids) bytes += stream.add(id);
  return bytes;
}

std::string Tokenizer::special_name(int32_t id) const {
  const std::string* name = bpe_ ? bpe_->pipeline.special(static_cast<uint32_t>(id)) : nullptr;
  return name ? *name : std::string();
}

TokenizerLibraries tokenizer_libraries() { return {bpe::regex_library(), bpe::nfc_library()}; }

struct TokenStream::State {
  bpe::Decoder::Run run;
};

TokenStream::TokenStream(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {
  tokenizer.require_text();
  if (!tokenizer.bpe_) return;
  state_ = std::make_unique<State>(State{bpe::Decoder::Run(tokenizer.bpe_->pipeline.decoder())});
}

TokenStream::~TokenStream() = default;

std::string TokenStream::add(int32_t id) {
  std::string out;
  if (!state_) {
    if (id >= 0 && id < 256) out += static_cast<char>(id);
    return out;
  }
  const std::string* spelling = tokenizer_.bpe_->pipeline.spelling(static_cast<uint32_t>(id));
  if (spelling) state_->run.add(*spelling, out);
  return out;
}

}  // namespace moiety::data
