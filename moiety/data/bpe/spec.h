// What a tokenizer.json says, in the order in which it is applied: added tokens are found, the text
// between them is normalized, split into words, and each word becomes ids.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace moiety::data::bpe {

// What is looked for: a text as it stands, or a pattern of Oniguruma.
struct Sought {
  bool is_pattern = false;
  std::string text;
  std::string place;  // of it in the file, for errors

  // The places of equal ones may differ.
  friend bool operator==(const Sought& a, const Sought& b) {
    return a.is_pattern == b.is_pattern && a.text == b.text;
  }
};

// Normalizers. Those of a Sequence stand one behind the other.
struct Nfc {};
struct Prepend {
  std::string text;
};
struct Replace {
  Sought sought;
  std::string content;
};
using NormalStep = std::variant<Nfc, Prepend, Replace>;

// Pre-tokenizers.
enum class Behavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };
struct Split {
  Sought sought;
  Behavior behavior = Behavior::kIsolated;
  bool invert = false;
};
struct ByteLevel {
  bool add_prefix_space = true, use_regex = true;
};
struct Digits {
  bool individual = false;
};
struct Punctuation {
  Behavior behavior = Behavior::kIsolated;
};
struct Metaspace {
  enum class Prepends { kNever, kFirst, kAlways };
  std::string mark;  // one character
  Prepends prepends = Prepends::kAlways;
  bool split = true;
};
using SplitStep = std::variant<Split, ByteLevel, Digits, Punctuation, Metaspace>;

// Decoders.
struct DecodeBytes {};   // the alphabet of ByteLevel
struct ByteFallback {};  // <0x0A>
struct Fuse {};          // what follows sees one text
struct StripText {
  std::string content;  // one character
  int64_t start = 0, stop = 0;
};
struct DecodeMetaspace {
  std::string mark;
  bool drops_first = true;
};
using DecodeStep =
    std::variant<DecodeBytes, ByteFallback, Fuse, StripText, DecodeMetaspace, Replace>;

struct AddedToken {
  std::string content;
  uint32_t id = 0;
  bool single_word = false, lstrip = false, rstrip = false, normalized = true, special = false;
};

struct Spec {
  std::vector<NormalStep> normal;
  std::vector<SplitStep> split;
  std::optional<std::vector<DecodeStep>> decode;  // none: tokens stand apart by spaces

  std::vector<std::pair<uint32_t, std::string>> vocab;  // by id
  std::vector<std::pair<std::string, std::string>> merges;
  bool ignore_merges = false, byte_fallback = false, fuse_unk = false;
  std::optional<std::string> unk_token;

  std::vector<AddedToken> added;        // by id
  std::vector<uint32_t> before, after;  // what TemplateProcessing puts around a text

  bool is_of_bytes() const {  // words are bytes, spelled in the alphabet of ByteLevel
    return !split.empty() && std::holds_alternative<ByteLevel>(split.back());
  }
};

// Reads the text of a tokenizer.json. `file` is its name in errors. Throws DataError for what is
// damaged, and Error(kUnsupported) for every field, type and value that is none of those above,
// with its JSON path.
Spec read_spec(const std::string& file, const std::string& json);

// The text of one character per byte in which vocabularies of bytes are spelled, and back; nothing
// if a character is none of that alphabet.
std::string spell_bytes(std::string_view bytes);
std::optional<std::string> unspell_bytes(std::string_view text);

}  // namespace moiety::data::bpe
