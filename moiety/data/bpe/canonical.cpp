// The text that a tokenizer's identity is the digest of. A change of it makes all token files of
// such tokenizers unreadable.
#include "moiety/base/format.h"
#include "moiety/data/bpe/pipeline.h"

namespace moiety::data::bpe {
namespace {

// Every text stands behind its length, so that no two lists are spelled alike.
class Spelling {
 public:
  Spelling& word(std::string_view s) {
    out += text("{}:", s.size());
    out += s;
    return *this;
  }
  Spelling& number(uint64_t n) {
    out += text("{};", n);
    return *this;
  }
  Spelling& sought(const Sought& s) { return number(s.is_pattern).word(s.text); }
  std::string out = "moiety tokenizer bpe 1\n";
};

struct StepSpelling {
  Spelling& s;
  void operator()(const Nfc&) { s.word("NFC"); }
  void operator()(const Prepend& p) { s.word("Prepend").word(p.text); }
  void operator()(const Replace& r) { s.word("Replace").sought(r.sought).word(r.content); }
  void operator()(const Split& p) {
    s.word("Split").sought(p.sought).number(uint64_t(p.behavior)).number(p.invert);
  }
  void operator()(const ByteLevel& b) {
    s.word("ByteLevel").number(b.add_prefix_space).number(b.use_regex);
  }
  void operator()(const Digits& d) { s.word("Digits").number(d.individual); }
  void operator()(const Punctuation& p) { s.word("Punctuation").number(uint64_t(p.behavior)); }
  void operator()(const Metaspace& m) {
    s.word("Metaspace").word(m.mark).number(uint64_t(m.prepends)).number(m.split);
  }
};

}  // namespace

std::string canonical(const Spec& spec) {
  Spelling s;
  s.number(spec.normal.size());
  for (const NormalStep& step : spec.normal) std::visit(StepSpelling{s}, step);
  s.number(spec.split.size());
  for (const SplitStep& step : spec.split) std::visit(StepSpelling{s}, step);
  s.number(spec.ignore_merges).number(spec.byte_fallback).number(spec.fuse_unk);
  s.number(spec.unk_token.has_value()).word(spec.unk_token.value_or(""));
  s.number(spec.vocab.size());
  for (const auto& [id, token] : spec.vocab) s.number(id).word(token);
  s.number(spec.merges.size());
  for (const auto& [left, right] : spec.merges) s.word(left).word(right);
  s.number(spec.added.size());
  for (const AddedToken& t : spec.added) {
    s.number(t.id).word(t.content).number(t.single_word).number(t.lstrip).number(t.rstrip);
    s.number(t.normalized).number(t.special);
  }
  return std::move(s.out);
}

}  // namespace moiety::data::bpe
