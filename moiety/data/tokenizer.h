// Tokenizers: text to token ids and back. One is built in, "bytes" (ids 0..255 are bytes, 256 eos,
// 257 bos, 258 pad; V = 264, so that sizes stay multiples of 8); others are read from a
// tokenizer.json of Hugging Face that has byte-pair encoding.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "moiety/data/sha256.h"

namespace moiety::data {

// A file of a tokenizer.
struct TokenizerFile {
  std::string name;  // without folders
  std::string bytes;
};

class Tokenizer {
 public:
  static constexpr uint32_t kNoToken = UINT32_MAX;

  // The tokenizer called `name`, as in data.tokenizer: "bytes", or the path of a tokenizer.json or
  // of the folder that has it, or of a token file (FILE.tok), which knows the ids of the tokenizer
  // that made it and no text: encoding and decoding are then Error(kUnsupported). A tokenizer_config.json and special_tokens_map.json beside it name
  // eos and bos; without them the template of the post-processor does, and for eos a usual name.
  // Throws UsageError if there is none, DataError if a file is damaged or contradicts itself, and
  // Error(kUnsupported), with the JSON path, for what ids would depend on and Moiety has not.
  static Tokenizer load(std::string_view name);
  // The same of files in memory: tokenizer.json, and the others if they are there.
  static Tokenizer of_files(std::string_view name, std::vector<TokenizerFile> files);

  const std::string& name() const { return name_; }
  uint32_t vocab() const { return vocab_; }
  // kNoToken where there is none.
  uint32_t eos() const { return eos_; }
  uint32_t bos() const { return bos_; }
  uint32_t pad() const { return pad_; }
  // The ids that the tokenizer's model expects before a text: often bos, or none.
  std::span<const uint32_t> before() const { return before_; }
  // An identity that is equal for tokenizers that give equal ids for every text, however their
  // files spell it: the SHA-256 of what defines them, eos and bos included.
  const Sha256& identity() const { return identity_; }
  // What a copy of it needs; nothing for "bytes".
  std::span<const TokenizerFile> files() const;

  // Appends the ids of the text, without eos or bos. Special tokens that it spells are text, or with
  // `special` ids. Throws DataError if the text is not UTF-8, which "bytes" does not ask for. For
  // several threads.
  void encode(std::string_view text, std::vector<uint32_t>& ids, bool special = false) const;
  // The same of a text between two tokens, special ones in it being text; `is_start`: of the first.
  void encode_part(std::string_view text, bool is_start, std::vector<uint32_t>& ids) const;
  // The id of an added token, such as "<|im_end|>"; kNoToken if there is none. Throws
  // Error(kUnsupported) if it takes spaces around it along, or counts only as a word of its own.
  uint32_t find_added(std::string_view token) const;
  // The bytes of the ids; special and unused ids give none. The bytes need not be UTF-8.
  std::string decode(std::span<const int32_t> ids) const;
  // What a special token is called, such as "<|im_end|>"; nothing for ids that are text.
  std::string special_name(int32_t id) const;

 private:
  friend class TokenStream;
  struct Bpe;
  Tokenizer() = default;
  static Tokenizer of_token_file(std::string_view path);
  void require_text() const;

  std::string name_;
  uint32_t vocab_ = 0, eos_ = kNoToken, bos_ = kNoToken, pad_ = kNoToken;
  std::vector<uint32_t> before_;
  Sha256 identity_{};
  bool has_text_ = true;
  std::shared_ptr<const Bpe> bpe_;  // null: bytes
};

// The libraries on which tokenizers run, with their versions; empty in a build without them.
struct TokenizerLibraries {
  std::string patterns;  // PCRE2
  std::string nfc;       // utf8proc
};
TokenizerLibraries tokenizer_libraries();

// The decoding of one text, id by id. The tokenizer outlives it.
class TokenStream {
 public:
  explicit TokenStream(const Tokenizer& tokenizer);
  ~TokenStream();
  TokenStream(const TokenStream&) = delete;
  TokenStream& operator=(const TokenStream&) = delete;

  // The bytes that an id adds. A character may come in several parts (utf8_stream.h).
  std::string add(int32_t id);

 private:
  struct State;
  const Tokenizer& tokenizer_;
  std::unique_ptr<State> state_;  // null: bytes
};

}  // namespace moiety::data
