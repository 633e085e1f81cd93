// A reader of JSON texts that are not trusted: UTF-8, one value, no duplicate keys, nesting
// bounded, integers exact, and the byte offset of everything, so that a refusal can say where.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace moiety::checkpoint {

struct JsonValue;
struct JsonMember;
using JsonArray = std::vector<JsonValue>;
using JsonObject = std::vector<JsonMember>;  // sorted by key

// A value. An integer beyond int64 is kept as double, so it does not count as an integer.
struct JsonValue {
  std::variant<std::monostate, bool, int64_t, double, std::string, JsonArray, JsonObject> value;
  // Byte range of the text; for values other than arrays and objects both are the end.
  size_t begin = 0, end = 0;
};

struct JsonMember {
  std::string key;
  JsonValue value;
};

// A document. Every refusal is a CheckpointError: "<file>: byte <n>: ...".
class JsonDocument {
 public:
  // `text` outlives the document; its first byte is byte `offset` of the file.
  JsonDocument(std::string file, std::string_view text, int max_depth, uint64_t offset = 0);

  const JsonValue& root() const { return root_; }
  const JsonObject& object(const JsonValue& v) const;
  const JsonArray& array(const JsonValue& v) const;
  const std::string& string(const JsonValue& v) const;
  int64_t integer(const JsonValue& v) const;  // not negative
  double number(const JsonValue& v) const;    // finite
  bool boolean(const JsonValue& v) const;
  // A number in lowercase hex of exactly `digits` digits.
  uint64_t hex(const JsonValue& v, int digits) const;
  const JsonValue& member(const JsonValue& object, std::string_view key) const;
  const JsonValue* find(const JsonValue& object, std::string_view key) const;
  std::string_view raw(const JsonValue& v) const { return text_.substr(v.begin, v.end - v.begin); }

  [[noreturn]] void refuse(size_t at, std::string_view why) const;
  [[noreturn]] void refuse(const JsonValue& at, std::string_view why) const { refuse(at.end, why); }

 private:
  std::string file_;
  std::string_view text_;
  uint64_t offset_;
  JsonValue root_;
};

// The string with quotation marks and escapes.
std::string json_string(std::string_view s);

// The reason why a text is no name of a tensor, which is not empty, at most 4096 bytes, and without
// control characters; null if it is one.
const char* name_fault(std::string_view name);

}  // namespace moiety::checkpoint
