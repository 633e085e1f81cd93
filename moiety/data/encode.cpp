// The encoding of blocks of documents into tokens.
#include <algorithm>

#include <nlohmann/json.hpp>

#include "moiety/base/error.h"
#include "moiety/base/printable.h"
#include "moiety/data/documents.h"

namespace moiety::data {
namespace {

// A fault of a document, at byte `at` of the block.
struct BadDocument {
  size_t at;
  std::string what;
};

void check_utf8(std::string_view s, size_t begin) {
  const size_t bad = find_bad_utf8(s);
  if (bad == std::string_view::npos) return;
  throw BadDocument{begin + bad,
                    text("byte {:#04x} is not UTF-8 (Latin-1 text? iconv -f latin1 -t utf-8 "
                         "converts it; --skip-bad leaves the document out)",
                         static_cast<unsigned char>(s[bad]))};
}

// Whether a key may stand more than once in a line.
bool may_repeat(std::string_view line, const std::string& key) {
  const std::string quoted = "\"" + key + "\"";
  const size_t first = line.find(quoted);
  return first != line.npos && line.find(quoted, first + 1) != line.npos;
}

// Parses a line. The parser takes the last of several values of one key, so a line in which the key
// of a text stands more than once is looked at more closely.
nlohmann::json parse_object(std::string_view line, size_t begin,
                            const std::vector<std::string>& keys) {
  const auto repeated = std::find_if(keys.begin(), keys.end(),
                                     [&](const std::string& key) { return may_repeat(line, key); });
  if (repeated == keys.end()) return nlohmann::json::parse(line);
  const std::string& key = *repeated;
  int texts = 0;
  nlohmann::json object = nlohmann::json::parse(
      line, [&](int depth, nlohmann::json::parse_event_t event, nlohmann::json& value) {
        texts += depth == 1 && event == nlohmann::json::parse_event_t::key && value == key;
        return true;
      });
  if (texts > 1) throw BadDocument{begin, text("key '{}' stands {} times", key, texts)};
  return object;
}

std::string text_of_json(std::string_view line, size_t begin,
                         const std::vector<std::string>& keys) {
  check_utf8(line, begin);
  try {
    const nlohmann::json object = parse_object(line, begin, keys);
    std::string all;
    for (const std::string& key : keys) {
      const auto value = object.is_object() ? object.find(key) : object.end();
      if (value == object.end()) {
        throw BadDocument{begin, text("no key '{}' (see --text-key)", key)};
      }
      if (!value->is_string()) {
        throw BadDocument{begin, text("'{}' is a JSON {}, not a string", key, value->type_name())};
      }
      if (&key != &keys.front()) all += '\n';
      all += value->get_ref<const std::string&>();
    }
    return all;
  } catch (const nlohmann::json::parse_error& e) {
    const std::string_view what = e.what();
    const size_t reason = what.find(": ");
    throw BadDocument{
        begin + std::min(e.byte > 0 ? e.byte - 1 : 0, line.size()),
        text("bad JSON: {}", printable(reason == what.npos ? what : what.substr(reason + 2)))};
  } catch (const nlohmann::json::out_of_range&) {
    throw BadDocument{begin, "bad JSON: a number is beyond double"};
  }
}

class Encoder {
 public:
  Encoder(const Block& block, const DocumentRules& rules, const Tokenizer& tokenizer)
      : block_(block), rules_(rules), tokenizer_(tokenizer) {
    out_.bytes = block.bytes.size();
    if (rules.chat) chat_.emplace(tokenizer, *rules.chat);
  }

  EncodedBlock run() {
    const std::string_view bytes = block_.bytes;
    const std::string_view separator = block_.jsonl ? "\n" : std::string_view(rules_.split);
    for (size_t begin = 0; begin < bytes.size();) {
      const size_t end = separator.empty() ? bytes.npos : bytes.find(separator, begin);
      piece(bytes.substr(begin, end - begin), begin);
      if (end == bytes.npos) break;
      begin = end + separator.size();
    }
    return std::move(out_);
  }

 private:
  void piece(std::string_view s, size_t begin) {
    if (block_.jsonl && s.find_first_not_of(" \t\r") == s.npos) return;  // a blank line
    try {
      if (chat_) {
        conversation(s, begin);
      } else if (block_.jsonl) {
        document(text_of_json(s, begin, rules_.text_keys));
      } else {
        check_utf8(s, begin);
        document(s);
      }
    } catch (const BadDocument& bad) {
      if (!rules_.skip_bad) {
        const auto until = block_.bytes.begin() + static_cast<ptrdiff_t>(bad.at);
        const auto line =
            block_.line + static_cast<uint64_t>(std::count(block_.bytes.begin(), until, '\n'));
        throw DataError("{}: line {}, byte {}: {}", block_.path, line, block_.offset + bad.at + 1,
                        bad.what);
      }
      ++out_.bad;
    }
  }

  void conversation(std::string_view line, size_t begin) {
    check_utf8(line, begin);
    ChatTokens tokens;
    try {
      tokens = chat_->render(parse_chat(line));
    } catch (const DataError& e) {
      throw BadDocument{begin, e.what()};
    }
    if (std::find(tokens.targets.begin(), tokens.targets.end(), 1) == tokens.targets.end()) {
      throw BadDocument{begin,
                        "a conversation without a message of the assistant: nothing to learn"};
    }
    out_.ids.insert(out_.ids.end(), tokens.ids.begin(), tokens.ids.end());
    out_.targets.insert(out_.targets.end(), tokens.targets.begin(), tokens.targets.end());
    out_.documents.push_back({tokens.ids.size(), tokens.target_bytes});
  }

  void document(std::string_view s) {
    if (s.empty()) {
      ++out_.empty;
      return;
    }
    const size_t begin = out_.ids.size();
    if (rules_.bos) out_.ids.push_back(tokenizer_.bos());
    tokenizer_.encode(s, out_.ids, rules_.parse_special);
    out_.ids.push_back(tokenizer_.eos());
    out_.documents.push_back({out_.ids.size() - begin, s.size()});
  }

  const Block& block_;
  const DocumentRules& rules_;
  const Tokenizer& tokenizer_;
  std::optional<ChatRenderer> chat_;
  EncodedBlock out_;
};

}  // namespace

EncodedBlock encode(const Block& block, const DocumentRules& rules, const Tokenizer& tokenizer) {
  return Encoder(block, rules, tokenizer).run();
}

size_t find_bad_utf8(std::string_view s) {
  const auto byte = [&](size_t i) { return i < s.size() ? static_cast<unsigned char>(s[i]) : 0u; };
  for (size_t i = 0; i < s.size();) {
    const unsigned lead = byte(i);
    if (lead < 0x80) {
      ++i;
      continue;
    }
    // The second byte of some leads has a narrower range, which rules out overlong forms,
    // surrogates and code points above U+10FFFF.
    unsigned low = 0x80, high = 0xbf;
    size_t length = 0;
    if (lead >= 0xc2 && lead <= 0xdf) length = 2;
    if (lead >= 0xe0 && lead <= 0xef) length = 3;
    if (lead >= 0xf0 && lead <= 0xf4) length = 4;
    if (lead == 0xe0) low = 0xa0;
    if (lead == 0xed) high = 0x9f;
    if (lead == 0xf0) low = 0x90;
    if (lead == 0xf4) high = 0x8f;
    if (length == 0 || byte(i + 1) < low || byte(i + 1) > high) return i;
    for (size_t k = 2; k < length; ++k) {
      if (byte(i + k) < 0x80 || byte(i + k) > 0xbf) return i;
    }
    i += length;
  }
  return std::string_view::npos;
}

}  // namespace moiety::data
