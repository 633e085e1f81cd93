// What is read of a tokenizer.json, what is refused, and identities.
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "moiety/base/error.h"
#include "moiety/data/tokenizer.h"
#include "tests/support/error_of.h"
#include "tests/support/files.h"

namespace moiety::data {
namespace {

// A tokenizer of the letters a, b, c and the space, and of "ab" and "abc".
nlohmann::json small() {
  return nlohmann::json::parse(R"({
    "version": "1.0", "truncation": null, "padding": null,
    "added_tokens": [{"id": 6, "content": "</s>", "special": true, "single_word": false,
                      "lstrip": false, "rstrip": false, "normalized": false}],
    "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": {"type": "Fuse"},
    "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
              "end_of_word_suffix": "", "fuse_unk": false, "byte_fallback": false,
              "ignore_merges": false,
              "vocab": {"a": 0, "b": 1, "c": 2, " ": 3, "ab": 4, "abc": 5},
              "merges": ["a b", "ab c"]}})");
}

Tokenizer tokenizer_of(const nlohmann::json& json, std::vector<TokenizerFile> more = {}) {
  more.push_back({"tokenizer.json", json.dump()});
  return Tokenizer::of_files("t.json", std::move(more));
}

// The small one with a value at a JSON pointer.
nlohmann::json with(const char* pointer, const char* value) {
  nlohmann::json json = small();
  json[nlohmann::json::json_pointer(pointer)] = nlohmann::json::parse(value);
  return json;
}

std::vector<uint32_t> ids_of(const Tokenizer& t, std::string_view text, bool special = false) {
  std::vector<uint32_t> ids;
  t.encode(text, ids, special);
  return ids;
}

using Ids = std::vector<uint32_t>;

TEST(TokenizerJson, MergesLowestRankFirst) {
  const Tokenizer t = tokenizer_of(small());
  EXPECT_EQ(t.vocab(), 7u);
  EXPECT_EQ(t.eos(), 6u);
  EXPECT_EQ(t.bos(), Tokenizer::kNoToken);
  EXPECT_EQ(ids_of(t, "abcab cba"), (Ids{5, 4, 3, 2, 1, 0}));
  EXPECT_EQ(ids_of(t, "xay"), Ids{0}) << "without unk_token unknown characters are dropped";
  EXPECT_EQ(ids_of(t, ""), Ids{});
}

TEST(TokenizerJson, SpecialTokensAreTextUnlessAskedFor) {
  const Tokenizer t = tokenizer_of(small());
  EXPECT_EQ(ids_of(t, "ab</s>c", true), (Ids{4, 6, 2}));
  EXPECT_EQ(ids_of(t, "ab</s>ac"), (Ids{4, 0, 2})) << "its characters are unknown";
  EXPECT_EQ(t.decode(std::vector<int32_t>{4, 6, 2, 99, -1}), "abc");
}

// A long word has a heap, a short one has none: the same ids.
TEST(TokenizerJson, LongWordsAreMergedAlike) {
  const Tokenizer t = tokenizer_of(small());
  std::string word;
  Ids expected;
  for (int i = 0; i < 300'000; ++i) {
    word += "abcabba";
    for (const uint32_t id : {5, 4, 1, 0}) expected.push_back(id);
  }
  // The a at the end of each part stands before the a of the next.
  EXPECT_EQ(ids_of(t, word), expected);
  EXPECT_EQ(ids_of(t, "abcabba"), (Ids{5, 4, 1, 0}));
}

TEST(TokenizerJson, OtherFieldsAreUnsupportedWithTheirPath) {
  const std::vector<std::tuple<const char*, const char*, const char*>> cases{
      {"/extra", "1", "t.json: extra is a field that Moiety does not know"},
      {"/truncation", R"({"max_length": 5})", "t.json: truncation = {\"max_length\":5} is not"},
      {"/padding", R"({})", "t.json: padding = {} is not supported"},
      {"/model/type", R"("Unigram")",
       "t.json: model.type = \"Unigram\" is not supported; there is: "},
      {"/model/dropout", "0.1", "t.json: model.dropout = 0.1 is not supported"},
      {"/model/end_of_word_suffix", R"("</w>")", "t.json: model.end_of_word_suffix = \"</w>\" is"},
      {"/model/cache", "5", "t.json: model.cache is a field that Moiety does not know"},
      {"/added_tokens/0/stem", "true", "t.json: added_tokens[0].stem is a field"},
      {"/normalizer", R"({"type": "Lowercase"})", "t.json: normalizer.type = \"Lowercase\" is not"},
      {"/normalizer", R"({"type": "Sequence", "normalizers": [{"type": "NFC", "x": 1}]})",
       "t.json: normalizer.normalizers[0].x is a field"},
      {"/pre_tokenizer",
       R"({"type": "Sequence", "pretokenizers": [{"type": "Digits"}, {"type": "BertPreTokenizer"}]})",
       "t.json: pre_tokenizer.pretokenizers[1].type = \"BertPreTokenizer\" is not supported; "
       "there"},
      {"/pre_tokenizer",
       R"({"type": "Split", "pattern": {"Regex": "[a&&b]"}, "behavior": "Isolated"})",
       "t.json: pre_tokenizer.pattern.Regex: the intersection of classes at byte 2 of the pattern"},
      {"/pre_tokenizer",
       R"({"type": "Split", "pattern": {"Regex": "(a)\\1"}, "behavior": "Isolated"})",
       "t.json: pre_tokenizer.pattern.Regex: this escape at byte 3"},
      {"/pre_tokenizer",
       R"({"type": "Split", "pattern": {"Regex": "\\p{Cn}"}, "behavior": "Isolated"})",
       "t.json: pre_tokenizer.pattern.Regex: the property Cn at byte 0"},
      {"/pre_tokenizer",
       R"-({"type": "Split", "pattern": {"Regex": "(?<=a+)b"}, "behavior": "Isolated"})-",
       "t.json: pre_tokenizer.pattern.Regex: PCRE2 refuses the pattern"},
      {"/pre_tokenizer",
       R"-({"type": "Split", "pattern": {"Regex": "(?i:ss)"}, "behavior": "Isolated"})-",
       "t.json: pre_tokenizer.pattern.Regex: \"ss\" without case at byte 6"},
      {"/pre_tokenizer",
       R"({"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}, {"type": "Digits"}]})",
       "t.json: pre_tokenizer.pretokenizers[1] stands behind a ByteLevel"},
      {"/post_processor", R"({"type": "RobertaProcessing"})",
       "t.json: post_processor.type = \"RobertaProcessing\" is not supported"},
      {"/decoder", R"({"type": "WordPiece"})", "t.json: decoder.type = \"WordPiece\" is not"},
  };
  for (const auto& [pointer, value, error] : cases) {
    const std::string got =
        error_of([&] { tokenizer_of(with(pointer, value)); }, ErrorKind::kUnsupported);
    EXPECT_EQ(got.substr(0, std::string(error).size()), error) << got;
  }
}

TEST(TokenizerJson, DamageIsADataErrorWithItsPath) {
  const std::vector<std::tuple<const char*, const char*, const char*>> cases{
      {"/model/vocab/b", "0", "t.json: model.vocab: a and b both have the id 0"},
      {"/model/vocab/b", "-1", "t.json: model.vocab: b: -1 is not an id below 16777216"},
      {"/model/vocab", "{}", "t.json: model.vocab: is empty"},
      {"/model/merges/0", R"("a b c")", "t.json: model.merges[0]: \"a b c\" is not two tokens"},
      {"/model/merges/1", R"(["a"])", "t.json: model.merges[1]: [\"a\"] is not a pair"},
      {"/model/merges/1", R"(["c", "a"])", "t.json: model.merges[1]: ca is not in model.vocab"},
      {"/model/fuse_unk", "3", "t.json: model.fuse_unk: 3 is not true or false"},
      {"/added_tokens/0/id", "5", "t.json: added_tokens[0].id: = 5 is abc already, not </s>"},
      {"/added_tokens/0/content", R"("ab")",
       "t.json: added_tokens[0].id: = 6, but ab has the id 4"},
      {"/post_processor",
       R"({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}],
           "special_tokens": {}})",
       "t.json: post_processor.single[0].SpecialToken.id: is not in special_tokens"},
  };
  for (const auto& [pointer, value, error] : cases) {
    const std::string got = error_of([&] { tokenizer_of(with(pointer, value)); }, ErrorKind::kData);
    EXPECT_EQ(got.substr(0, std::string(error).size()), error) << got;
  }
  EXPECT_EQ(error_of(
                [] {
                  Tokenizer::of_files("t.json", {{"tokenizer.json", "{\"model\""}});
                },
                ErrorKind::kData)
                .substr(0, 17),
            "t.json: not JSON:");
  const std::string deep = R"({"model": {}, "truncation": )" + std::string(1 << 20, '[');
  EXPECT_EQ(error_of(
                [&] {
                  Tokenizer::of_files("t.json", {{"tokenizer.json", deep}});
                },
                ErrorKind::kData),
            "t.json: nests deeper than 64");
  EXPECT_EQ(error_of([] { ids_of(tokenizer_of(small()), "a\xff"); }, ErrorKind::kData),
            "t.json: byte 1 of a text is not UTF-8");
}

// What names eos and bos: tokenizer_config.json, then special_tokens_map.json, then the template.
TEST(TokenizerJson, EosAndBosAreNamedBesideIt) {
  nlohmann::json json = small();
  EXPECT_EQ(tokenizer_of(json, {{"tokenizer_config.json", R"({"eos_token": "c"})"}}).eos(), 2u);
  EXPECT_EQ(
      tokenizer_of(json, {{"special_tokens_map.json", R"({"eos_token": {"content": "b"}})"},
                          {"tokenizer_config.json", R"({"bos_token": "c", "eos_token": null})"}})
          .eos(),
      1u);
  EXPECT_EQ(error_of(
                [&] {
                  tokenizer_of(json, {{"tokenizer_config.json", R"({"eos_token": "x"})"}});
                },
                ErrorKind::kData),
            "tokenizer_config.json beside t.json: eos_token is x, which is no token");
  json["post_processor"] = nlohmann::json::parse(R"({
    "type": "TemplateProcessing", "pair": [],
    "single": [{"SpecialToken": {"id": "B", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
               {"SpecialToken": {"id": "E", "type_id": 0}}],
    "special_tokens": {"B": {"id": "B", "ids": [0], "tokens": ["a"]},
                       "E": {"id": "E", "ids": [1], "tokens": ["b"]}}})");
  const Tokenizer t = tokenizer_of(json);
  EXPECT_EQ(t.bos(), 0u);
  EXPECT_EQ(t.eos(), 1u);
  EXPECT_EQ(std::vector<uint32_t>(t.before().begin(), t.before().end()), Ids{0});
}

TEST(TokenizerJson, IdentityIsOfIdsAndNotOfSpelling) {
  const std::string own = hex(tokenizer_of(small()).identity());
  // Stands in token files: a change makes all of them unreadable.
  EXPECT_EQ(own, "a95eef3d9acc8180b4ee365b8b7bce28bed2ed5438405b96b0ef0a3464e67df6");
  nlohmann::json same = small();
  same["model"]["merges"] = nlohmann::json::parse(R"([["a", "b"], ["ab", "c"]])");
  same["model"].erase("ignore_merges");
  same["normalizer"] = nlohmann::json::parse(R"({"type": "Sequence", "normalizers": []})");
  same["decoder"] = nullptr;
  EXPECT_EQ(hex(tokenizer_of(same).identity()), own);
  for (const auto& [pointer, value] : std::vector<std::pair<const char*, const char*>>{
           {"/model/ignore_merges", "true"},
           {"/model/merges", R"(["ab c", "a b"])"},
           {"/normalizer", R"({"type": "Prepend", "prepend": "a"})"},
           {"/pre_tokenizer", R"({"type": "Digits", "individual_digits": true})"},
           {"/added_tokens/0/rstrip", "true"}}) {
    EXPECT_NE(hex(tokenizer_of(with(pointer, value)).identity()), own) << pointer;
  }
  EXPECT_NE(
      hex(tokenizer_of(small(), {{"tokenizer_config.json", R"({"eos_token": "c"})"}}).identity()),
      own)
      << "documents end in another token";
}

TEST(TokenizerJson, IsFoundByPathOrFolder) {
  const TemporaryDirectory dir;
  const std::string path = dir.write("t/tokenizer.json", small().dump());
  dir.write("t/tokenizer_config.json", R"({"eos_token": "c", "chat_template": "x"})");
  EXPECT_EQ(Tokenizer::load(path).eos(), 2u);
  const Tokenizer t = Tokenizer::load(dir / "t");
  EXPECT_EQ(t.identity(), Tokenizer::load(path).identity());
  ASSERT_EQ(t.files().size(), 2u);
  EXPECT_EQ(t.files()[0].bytes, small().dump());
  dir.write("s/tokenizer.model", "x");
  EXPECT_NE(error_of([&] { Tokenizer::load(dir / "s"); }, ErrorKind::kUnsupported)
                .find("AutoTokenizer.from_pretrained"),
            std::string::npos);
  dir.write("e/x", "");
  EXPECT_EQ(error_of([&] { Tokenizer::load(dir / "e"); }, ErrorKind::kUsage),
            "tokenizer '" + (dir / "e") + "': the folder has no tokenizer.json");
}

}  // namespace
}  // namespace moiety::data
