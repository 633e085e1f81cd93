// Tokenizers against the `tokenizers` package, which made tests/golden/tokenizers
// (tests/data/tokenizers/make_golden.py).
#include <fstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "moiety/data/bpe/regex.h"
#include "moiety/data/sha256.h"
#include "moiety/data/tokenizer.h"
#include "tests/support/files.h"

namespace moiety::data {
namespace {

const std::string kFolder = MOIETY_SOURCE_DIR "/tests/golden/tokenizers/";

nlohmann::json read_golden(const std::string& name) {
  return nlohmann::json::parse(read_all(kFolder + name + ".json"));
}

Tokenizer tokenizer_of(const nlohmann::json& json) {
  return Tokenizer::of_files("tokenizer.json", {{"tokenizer.json", json.dump()}});
}

std::vector<uint32_t> ids_of(const Tokenizer& t, const std::string& text, bool special) {
  std::vector<uint32_t> ids;
  t.encode(text, ids, special);
  return ids;
}

// The package replaces what is not UTF-8, byte by byte or not; a text with such parts is not compared.
bool has_replacement(const std::string& text) { return text.find("\ufffd") != text.npos; }

class TokenizerGolden : public testing::TestWithParam<const char*> {};

TEST_P(TokenizerGolden, IdsAndTextsAreThoseOfThePackage) {
  const nlohmann::json golden = read_golden(GetParam());
  const Tokenizer t = tokenizer_of(golden["tokenizer"]);
  int decoded = 0;
  for (const nlohmann::json& c : golden["cases"]) {
    const std::string text = c["text"];
    SCOPED_TRACE(text);
    const auto expected = c["ids"].get<std::vector<uint32_t>>();
    EXPECT_EQ(ids_of(t, text, true), expected);
    const auto plain = c.contains("plain") ? c["plain"].get<std::vector<uint32_t>>() : expected;
    EXPECT_EQ(ids_of(t, text, false), plain);
    if (has_replacement(c["decoded"])) continue;
    ++decoded;
    EXPECT_EQ(t.decode({reinterpret_cast<const int32_t*>(expected.data()), expected.size()}),
              c["decoded"].get<std::string>());
  }
  EXPECT_GT(decoded, 50);
}

INSTANTIATE_TEST_SUITE_P(Kinds, TokenizerGolden,
                         testing::Values("gpt2_prefix", "qwen3", "llama3", "o200k", "deepseek",
                                         "smollm2", "odd", "mixtral", "metaspace_first",
                                         "metaspace_never", "punctuation", "no_unknown",
                                         "merged_with_next_inverted", "of_text"),
                         [](const auto& info) { return std::string(info.param); });

// Every class, at every code point.
TEST(TokenizerClasses, AreThoseOfThePackage) {
  std::string everything;
  std::vector<char32_t> at;  // by byte
  for (char32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xd800 && c < 0xe000) continue;
    bpe::append_utf8(everything, c);
    at.resize(everything.size(), c);
  }
  for (const nlohmann::json& golden : read_golden("classes")) {
    const std::string pattern = golden["pattern"];
    bpe::Matcher matcher(bpe::Pattern({true, pattern, "test"}));
    std::string bits(0x110000 / 8, '\0');
    int64_t count = 0;
    matcher.find_all(everything, [&](bpe::Matcher::Range m) {
      ++count;
      bits[at[m.begin] / 8] |= static_cast<char>(1 << at[m.begin] % 8);
    });
    EXPECT_EQ(count, golden["count"].get<int64_t>()) << pattern;
    EXPECT_EQ(hex(sha256(bits)), golden["sha256"].get<std::string>()) << pattern;
  }
}

// Text of byte-level tokenizers comes back as it was.
TEST(TokenizerRoundTrip, OfByteLevel) {
  for (const char* name : {"smollm2", "deepseek", "llama3", "o200k"}) {
    const nlohmann::json golden = read_golden(name);
    const Tokenizer t = tokenizer_of(golden["tokenizer"]);
    for (const nlohmann::json& c : golden["cases"]) {
      const std::string text = c["text"];
      const std::vector<uint32_t> ids = ids_of(t, text, false);
      // What an added token strips is no part of it.
      if (text.find("right>") != text.npos || text.find("new tok") != text.npos) continue;
      EXPECT_EQ(t.decode({reinterpret_cast<const int32_t*>(ids.data()), ids.size()}), text) << name;
    }
  }
}

}  // namespace
}  // namespace moiety::data
