// What a Tokenizer of a tokenizer.json holds.
#pragma once

#include <string>
#include <vector>

#include "moiety/data/bpe/pipeline.h"
#include "moiety/data/tokenizer.h"

namespace moiety::data {

inline constexpr std::string_view kTokenizerJson = "tokenizer.json",
                                  kTokenizerConfig = "tokenizer_config.json",
                                  kSpecialTokensMap = "special_tokens_map.json";

struct Tokenizer::Bpe {
  Bpe(std::string name, std::vector<TokenizerFile> given);

  std::vector<TokenizerFile> files;
  bpe::Spec spec;  // without vocabulary and merges
  std::string canonical;
  bpe::Pipeline pipeline;
  std::vector<uint32_t> before;
  uint32_t eos = kNoToken, bos = kNoToken, pad = kNoToken;

 private:
  Bpe(std::string name, std::vector<TokenizerFile> given, bpe::Spec whole);
  void find_special(const std::string& name);
};

}  // namespace moiety::data
