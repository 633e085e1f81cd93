#include "moiety/checkpoint/safetensors.h"

#include <cstring>
#include <random>

#include <gtest/gtest.h>

#include "moiety/checkpoint/checkpoint_error.h"
#include "moiety/checkpoint/json.h"
#include "tests/checkpoint/state_testing.h"

namespace moiety::checkpoint {
namespace {

std::string with_length(const std::string& json, const std::string& data, int64_t off_by = 0) {
  const uint64_t length = json.size() + uint64_t(off_by);
  return std::string(reinterpret_cast<const char*>(&length), 8) + json + data;
}

std::string repeat(const std::string& s, int n) {
  std::string out;
  for (int i = 0; i < n; ++i) out += s;
  return out;
}

struct Hostile {
  const char* name;
  std::string bytes;
  const char* expected;  // part of the error
};

// An entry "t" of four bytes of data in all.
std::string entry(const std::string& fields) {
  return with_length("{\"t\":{" + fields + "}}", "abcd");
}

const std::vector<Hostile>& hostile_files() {
  static const std::string good = R"("dtype":"F32","shape":[1],"data_offsets":[0,4])";
  static const std::vector<Hostile> files{
      {"empty", "", "0 bytes are no safetensors file"},
      {"seven bytes", "1234567", "7 bytes are no safetensors file"},
      {"length beyond the file", with_length("{}", "", 1), "does not fit"},
      {"length of 2^64-1", std::string(8, '\xFF') + "{}", "does not fit"},
      {"length over the limit", with_length("{}", "", 100'000'000), "does not fit"},
      {"no header", with_length("", ""), "not JSON"},
      {"not UTF-8", with_length("{\"\xFF\xFE\":1}", ""), "not JSON"},
      {"an array", with_length("[]", ""), "does not begin with {"},
      {"a space before", with_length(" {}", ""), "does not begin with {"},
      {"a byte order mark", with_length("\xEF\xBB\xBF{}", ""), "byte order mark"},
      {"text behind", with_length("{}x", ""), "not JSON"},
      {"a second object", with_length("{}{}", ""), "not JSON"},
      {"NUL and text behind", with_length(std::string("{}\0{}", 5), ""), "NUL"},
      {"nested too deep", with_length(repeat("{\"a\":", 9) + "1" + repeat("}", 9), ""), "deeper"},
      {"nested 50000 deep", with_length("{\"a\":" + repeat("[", 50000), ""), "deeper"},
      {"never closed", with_length("{\"a\":{", ""), "not JSON"},
      {"duplicate tensor",
       with_length("{\"t\":{" + good + "},\"u\":{" + good + "},\"t\":{" + good + "}}", "abcd"),
       "duplicate key \"t\""},
      {"duplicate escaped",
       with_length("{\"t\":{" + good + "},\"\\u0074\":{" + good + "}}", "abcd"),
       "duplicate key \"t\""},
      {"duplicate field", entry(good + R"(,"shape":[1])"), "duplicate key \"shape\""},
      {"duplicate metadata", with_length(R"({"__metadata__":{"a":"1","a":"2"}})", ""), "duplicate"},
      {"metadata of numbers", with_length(R"({"__metadata__":{"a":1}})", ""), "expected a string"},
      {"metadata a string", with_length(R"({"__metadata__":"a"})", ""), "expected an object"},
      {"entry a number", with_length(R"({"t":1})", "abcd"), "expected an object"},
      {"no dtype", entry(R"("shape":[1],"data_offsets":[0,4])"), "\"dtype\" is missing"},
      {"no shape", entry(R"("dtype":"F32","data_offsets":[0,4])"), "\"shape\" is missing"},
      {"no offsets", entry(R"("dtype":"F32","shape":[1])"), "\"data_offsets\" is missing"},
      {"unknown field", entry(good + R"(,"extra":1)"), "unknown field \"extra\""},
      {"unknown dtype", entry(R"("dtype":"F33","shape":[1],"data_offsets":[0,4])"),
       "unknown dtype"},
      {"dtype a number", entry(R"("dtype":32,"shape":[1],"data_offsets":[0,4])"), "a string"},
      {"nine dimensions",
       entry(R"("dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4])"), "9 dimensions"},
      {"negative size", entry(R"("dtype":"F32","shape":[-1],"data_offsets":[0,4])"), "negative"},
      {"fractional size", entry(R"("dtype":"F32","shape":[1.0],"data_offsets":[0,4])"), "integer"},
      {"exponent", entry(R"("dtype":"F32","shape":[1e0],"data_offsets":[0,4])"), "integer"},
      {"size 2^63", entry(R"("dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,4])"),
       "integer"},
      {"size 2^64", entry(R"("dtype":"F32","shape":[18446744073709551616],"data_offsets":[0,4])"),
       "integer"},
      {"product overflows",
       entry(R"("dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4])"), "overflows"},
      {"bits overflow", entry(R"("dtype":"F32","shape":[288230376151711745],"data_offsets":[0,4])"),
       "overflows"},
      {"half a byte", entry(R"("dtype":"F4","shape":[7],"data_offsets":[0,4])"), "whole bytes"},
      {"one offset", entry(R"("dtype":"F32","shape":[1],"data_offsets":[0])"), "two numbers"},
      {"offsets a string", entry(R"("dtype":"F32","shape":[1],"data_offsets":"04")"), "an array"},
      {"begin after end", entry(R"("dtype":"F32","shape":[1],"data_offsets":[4,0])"), "do not fit"},
      {"end after data", entry(R"("dtype":"F32","shape":[2],"data_offsets":[0,8])"), "do not fit"},
      {"negative offset", entry(R"("dtype":"F32","shape":[1],"data_offsets":[-4,0])"), "negative"},
      {"too few bytes", entry(R"("dtype":"F32","shape":[2],"data_offsets":[0,4])"), "needs 8"},
      {"overlap",
       with_length(R"({"t":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},)"
                   R"("u":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})",
                   "abcd"),
       "overlapping"},
      {"hole",
       with_length(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                   R"("u":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})",
                   "abcd"),
       "hole"},
      {"hole at the start", entry(R"("dtype":"U8","shape":[3],"data_offsets":[1,4])"), "hole"},
      {"bytes behind", entry(R"("dtype":"U8","shape":[3],"data_offsets":[0,3])"), "which has 4"},
      {"data without tensors", with_length("{}", "abcd"), "which has 4"},
      {"empty name", with_length("{\"\":{" + good + "}}", "abcd"), "empty name"},
      {"long name", with_length("{\"" + std::string(4097, 'n') + "\":{" + good + "}}", "abcd"),
       "over 4096"},
      {"control character", with_length("{\"a\\nb\":{" + good + "}}", "abcd"), "control character"},
      {"escaped NUL", with_length("{\"a\\u0000\":{" + good + "}}", "abcd"), "control character"},
  };
  return files;
}

TEST(Safetensors, RefusesEveryHostileFile) {
  const TemporaryDirectory directory;
  for (const Hostile& h : hostile_files()) {
    const std::string path = directory / "hostile.safetensors";
    write_file(path, h.bytes);
    try {
      SafetensorsReader::open(path);
      ADD_FAILURE() << h.name << " was read";
    } catch (const CheckpointError& e) {
      EXPECT_NE(std::string(e.what()).find(h.expected), std::string::npos)
          << h.name << ": " << e.what();
      EXPECT_EQ(std::string(e.what()).find(path), 0u) << h.name << ": " << e.what();
    }
  }
}

TEST(Safetensors, ErrorsSayWhere) {
  const std::string json = R"({"t":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}})";
  EXPECT_EQ(error_of([&] { parse_header("f", json, 4); }),
            text("f: byte {}: unknown dtype \"F33\"", 8 + json.find(",\"shape")));
  EXPECT_EQ(error_of([&] { parse_header("f", "{\"t\":}", 0); }).find("f: byte 14: not JSON near"),
            0u);
}

TEST(Safetensors, ZeroSizeTensorsScalarsAndEveryType) {
  std::string json = "{";
  uint64_t at = 0;
  const char* types[] = {"F64",  "I64",     "U64",     "F32",     "I32", "U32",
                         "F16",  "BF16",    "I16",     "U16",     "I8",  "U8",
                         "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4"};
  for (const char* type : types) {
    const StoredType* t = find_stored_type(type);
    ASSERT_NE(t, nullptr) << type;
    const uint64_t end = at + uint64_t(t->bits) * 2 / 8;
    json += text("\"{}\":{{\"dtype\":\"{}\",\"shape\":[1,2],\"data_offsets\":[{},{}]}},", type,
                 type, at, end);
    if (t->dtype) {
      EXPECT_EQ(bits(*t->dtype), t->bits);
      EXPECT_STREQ(stored_type(*t->dtype).name, type);
    }
    at = end;
  }
  json += text(R"("none":{{"dtype":"F32","shape":[0,7],"data_offsets":[{},{}]}},)", at, at);
  json += R"("first":{"dtype":"F32","shape":[3,0],"data_offsets":[0,0]},)";
  json += text(R"("scalar":{{"dtype":"F32","shape":[],"data_offsets":[{},{}]}}}}   )", at, at + 4);
  const SafetensorsHeader header = parse_header("f", json, at + 4);
  EXPECT_EQ(header.entries.size(), std::size(types) + 3);
  EXPECT_EQ(header.entries.front().name, "first");
  EXPECT_EQ(header.entries.back().name, "scalar");
}

std::vector<Entry> two_entries() {
  return {{"a", &stored_type(DType::kFloat32), {2}, 0, 8},
          {"b \"quoted\" \xC3\xA9", &stored_type(DType::kUInt8), {3}, 8, 11}};
}

TEST(Safetensors, WhatIsEncodedReadsBack) {
  const TemporaryDirectory directory;
  const std::string path = directory / "x.safetensors";
  const Metadata metadata{{"format", "moiety"}, {"odd", "{\"x\":\"\\\n\"}"}};
  const std::string header = encode_header(two_entries(), metadata);
  EXPECT_EQ(header.size() % 64, 0u);
  EXPECT_EQ(encode_header({}, {}).size(), 64u);
  write_file(path, header + "01234567abc");

  const auto reader = SafetensorsReader::open(path);
  EXPECT_EQ(reader.metadata(), metadata);
  EXPECT_EQ(reader.bytes(), header.size() + 11);
  ASSERT_EQ(reader.entries().size(), 2u);
  EXPECT_EQ(reader.entries()[1].name, two_entries()[1].name);
  EXPECT_EQ(reader.entries()[1].shape, std::vector<int64_t>{3});
  std::string got(3, ' ');
  reader.read(8, std::as_writable_bytes(std::span(got)));
  EXPECT_EQ(got, "abc");
  EXPECT_NE(error_of([&] { reader.read(9, std::as_writable_bytes(std::span(got))); }), kNoError);
}

TEST(Safetensors, FileCutAfterItWasOpenedIsAnIoError) {
  const TemporaryDirectory directory;
  const std::string path = directory / "x.safetensors";
  write_file(path, encode_header(two_entries(), {}) + "01234567abc");
  const auto reader = SafetensorsReader::open(path);
  std::filesystem::resize_file(path, reader.bytes() - 4);
  std::string got(11, ' ');
  try {
    reader.read(0, std::as_writable_bytes(std::span(got)));
    ADD_FAILURE();
  } catch (const CheckpointError&) {
    ADD_FAILURE() << "a disk's failure, not the format's";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kIo);
    EXPECT_NE(std::string(e.what()).find("expected 11 bytes"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("got 7"), std::string::npos) << e.what();
  }
}

TEST(Json, IntegersAreExactAndKeptTextIsRaw) {
  const std::string s =
      R"({"big":9007199254740993, "object": { "x" : [1.50, -0] } ,"max":9223372036854775807})";
  const JsonDocument json("f", s, 4);
  EXPECT_EQ(json.integer(json.member(json.root(), "big")), 9007199254740993);
  EXPECT_EQ(json.integer(json.member(json.root(), "max")), INT64_MAX);
  EXPECT_EQ(json.raw(json.member(json.root(), "object")), R"({ "x" : [1.50, -0] })");
  EXPECT_EQ(json.raw(json.root()), s);
  EXPECT_EQ(json.find(json.root(), "bi"), nullptr);
}

// Bytes changed, removed, inserted and repeated.
std::string mutate(std::string s, std::mt19937& random) {
  static const std::string kTokens = "{}[]\",:0123456789-.eE\\u \xFF";
  for (int edits = 1 + int(random() % 4); edits > 0 && !s.empty(); --edits) {
    const size_t at = random() % s.size(), n = random() % 24;
    switch (random() % 4) {
      case 0:
        s[at] = kTokens[random() % kTokens.size()];
        break;
      case 1:
        s.erase(at, n);
        break;
      case 2:
        s.insert(at, 1, kTokens[random() % kTokens.size()]);
        break;
      default:
        s.insert(at, s.substr(random() % s.size(), n));
    }
  }
  return s;
}

TEST(Fuzz, HeadersAreReadOrRefused) {
  std::vector<std::string> corpus;
  for (const Hostile& h : hostile_files()) {
    if (h.bytes.size() > 8 && h.bytes.size() < 4000) corpus.push_back(h.bytes.substr(8));
  }
  const std::string good = encode_header(two_entries(), {{"a", "b"}}).substr(8);
  std::mt19937 random(6);
  int read = 0;
  for (int i = 0; i < 20000; ++i) {
    const std::string json = mutate(i % 2 ? good : corpus[random() % corpus.size()], random);
    const uint64_t data_bytes = i % 2 ? 11 : 4;
    try {
      const SafetensorsHeader header = parse_header("f", json, data_bytes);
      uint64_t at = 0;
      for (const Entry& e : header.entries) {
        ASSERT_EQ(e.begin, at);
        at = e.end;
      }
      ASSERT_EQ(at, data_bytes);
      ++read;
    } catch (const CheckpointError&) {
    }
  }
  EXPECT_GT(read, 10);
}

TEST(Fuzz, ManifestsAreReadOrRefused) {
  const TemporaryDirectory directory;
  const SaveResult saved = save_small(directory / "c", Cut::kFlat, 2, 7, 1);
  const std::string good = read_file(saved.path + "/manifest.json");
  std::mt19937 random(7);
  int read = 0;
  for (int i = 0; i < 3000; ++i) {
    try {
      const Manifest m = parse_manifest(mutate(good, random));
      encode_manifest(m);
      check_tiling(m);
      ++read;
    } catch (const CheckpointError&) {
    }
  }
  EXPECT_GT(read, 10);  // spaces, and names of other tensors
}

TEST(Fuzz, PieceKeysAreReadOrRefused) {
  std::mt19937 random(8);
  for (int i = 0; i < 20000; ++i) {
    const std::string key = mutate("weight/layers.3.fc1[0:16/128,0:1536/1536]", random);
    try {
      const PieceName name = parse_piece_key("f", key);
      ASSERT_EQ(piece_key(name.slot, name.tensor, name.shape, name.box), key);
      ASSERT_TRUE(contains(whole(name.shape), name.box));
    } catch (const CheckpointError&) {
    }
  }
}

}  // namespace
}  // namespace moiety::checkpoint
