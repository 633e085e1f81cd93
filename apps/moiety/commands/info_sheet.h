// What `moiety info` tells of a thing: lines for people, and the same as JSON.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "moiety/base/json_line.h"

namespace moiety::app {

struct InfoSheet {
  std::vector<std::pair<std::string, std::string>> lines;  // a word, and what it is
  JsonLine json;

  void line(std::string word, std::string text) {
    lines.emplace_back(std::move(word), std::move(text));
  }
};

// The part of a token file's documents that is shown.
struct ShownDocuments {
  int64_t from = 0;                 // the first document
  int64_t count = 3;                // documents
  int64_t tokens = 80;              // of each, from its beginning
  bool color = false;               // tokens without a loss are dimmed; else they stand in braces
  std::string tokenizer = "bytes";  // for their text, if the file was made with it
};

InfoSheet token_file_info(const std::string& path, const ShownDocuments& shown);
// With `tensors`, names and shapes of all tensors too; of a run those of its newest checkpoint.
InfoSheet checkpoint_info(const std::string& path, bool tensors);
InfoSheet run_info(const std::string& path, bool tensors);

// Text as JSON. What is no UTF-8, such as half a character, becomes U+FFFD.
std::string text_json(std::string_view bytes);
// A list of JSON values as JSON.
std::string list_json(std::span<const std::string> values);

}  // namespace moiety::app
