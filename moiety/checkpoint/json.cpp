#include "moiety/checkpoint/json.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <utility>

#include <nlohmann/json.hpp>

#include "moiety/base/printable.h"
#include "moiety/checkpoint/checkpoint_error.h"

namespace moiety::checkpoint {
namespace {

constexpr size_t kMostShown = 100;  // of a damaged text, in errors

// Characters of the text; it counts those that the parser has taken.
class Cursor {
 public:
  using iterator_category = std::forward_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  Cursor() = default;
  Cursor(const char* at, const char** taken) : at_(at), taken_(taken) {}
  reference operator*() const { return *at_; }
  Cursor& operator++() {
    *taken_ = ++at_;
    return *this;
  }
  Cursor operator++(int) {
    Cursor before = *this;
    ++*this;
    return before;
  }
  friend bool operator==(const Cursor& a, const Cursor& b) { return a.at_ == b.at_; }

 private:
  const char* at_ = nullptr;
  const char** taken_ = nullptr;
};

// Builds the value from the parser's events.
class Builder : public nlohmann::json_sax<nlohmann::json> {
 public:
  Builder(const JsonDocument& document, const char* text, const char** taken, int max_depth)
      : document_(document), text_(text), taken_(taken), max_depth_(max_depth) {}

  JsonValue take() { return std::move(root_); }

  bool null() override { return add(std::monostate{}); }
  bool boolean(bool v) override { return add(v); }
  bool number_integer(number_integer_t v) override { return add(int64_t{v}); }
  bool number_unsigned(number_unsigned_t v) override {
    return v <= INT64_MAX ? add(static_cast<int64_t>(v)) : add(static_cast<double>(v));
  }
  bool number_float(number_float_t v, const string_t&) override { return add(double{v}); }
  bool string(string_t& v) override { return add(std::move(v)); }
  bool binary(binary_t&) override { return false; }
  bool start_object(size_t) override { return open(JsonObject{}); }
  bool start_array(size_t) override { return open(JsonArray{}); }
  bool end_array() override { return close(); }
  bool key(string_t& v) override {
    std::get<JsonObject>(open_.back()->value).push_back({std::move(v), {}});
    return true;
  }
  bool end_object() override {
    auto& members = std::get<JsonObject>(open_.back()->value);
    std::sort(members.begin(), members.end(),
              [](const auto& a, const auto& b) { return a.key < b.key; });
    const auto twice =
        std::adjacent_find(members.begin(), members.end(),
                           [](const auto& a, const auto& b) { return a.key == b.key; });
    if (twice != members.end()) {
      document_.refuse(std::max(twice->value.end, std::next(twice)->value.end),
                       "duplicate key " + json_string(printable(twice->key, kMostShown)));
    }
    return close();
  }
  bool parse_error(size_t, const std::string& token,
                   const nlohmann::detail::exception& e) override {
    document_.refuse(taken(), "not JSON near " + json_string(printable(token, kMostShown)) + ": " +
                                  parser_text(e.what()));
  }

 private:
  size_t taken() const { return static_cast<size_t>(*taken_ - text_); }

  // The place for a new value: the root, the next element of the open array, or the member of the
  // last key.
  JsonValue& place() {
    if (open_.empty()) return root_;
    if (auto* array = std::get_if<JsonArray>(&open_.back()->value)) return array->emplace_back();
    return std::get<JsonObject>(open_.back()->value).back().value;
  }
  template <class T>
  bool add(T&& v) {
    JsonValue& value = place();
    value.value = std::forward<T>(v);
    value.begin = value.end = taken();
    return true;
  }
  template <class T>
  bool open(T&& empty) {
    if (static_cast<int>(open_.size()) == max_depth_) {
      document_.refuse(taken(), text("nested deeper than {}", max_depth_));
    }
    JsonValue& value = place();
    value.value = std::forward<T>(empty);
    value.begin = taken() - 1;
    open_.push_back(&value);
    return true;
  }
  bool close() {
    open_.back()->end = taken();
    open_.pop_back();
    return true;
  }

  const JsonDocument& document_;
  const char* text_;
  const char** taken_;
  int max_depth_;
  JsonValue root_;
  std::vector<JsonValue*> open_;  // elements are added only to the last one, so addresses hold
};

}  // namespace

JsonDocument::JsonDocument(std::string file, std::string_view text, int max_depth, uint64_t offset)
    : file_(std::move(file)), text_(text), offset_(offset) {
  // The parser would skip a byte order mark and take a NUL for the end.
  if (const size_t nul = text.find('\0'); nul != text.npos) refuse(nul, "a NUL byte");
  if (text.starts_with("\xEF\xBB\xBF")) refuse(size_t{0}, "a byte order mark");
  const char* taken = text.data();
  Builder builder(*this, text.data(), &taken, max_depth);
  nlohmann::json::sax_parse(Cursor(text.data(), &taken), Cursor(text.data() + text.size(), &taken),
                            &builder);
  root_ = builder.take();
}

void JsonDocument::refuse(size_t at, std::string_view why) const {
  throw CheckpointError(moiety::text("{}: byte {}: {}", file_, offset_ + at, why));
}

const JsonObject& JsonDocument::object(const JsonValue& v) const {
  if (const auto* members = std::get_if<JsonObject>(&v.value)) return *members;
  refuse(v, "expected an object");
}

const JsonArray& JsonDocument::array(const JsonValue& v) const {
  if (const auto* items = std::get_if<JsonArray>(&v.value)) return *items;
  refuse(v, "expected an array");
}

const std::string& JsonDocument::string(const JsonValue& v) const {
  if (const auto* s = std::get_if<std::string>(&v.value)) return *s;
  refuse(v, "expected a string");
}

int64_t JsonDocument::integer(const JsonValue& v) const {
  const auto* n = std::get_if<int64_t>(&v.value);
  if (!n) refuse(v, "expected an integer below 2^63");
  if (*n < 0) refuse(v, text("{} is negative", *n));
  return *n;
}

double JsonDocument::number(const JsonValue& v) const {
  double x = std::numeric_limits<double>::infinity();
  if (const auto* whole = std::get_if<int64_t>(&v.value)) x = static_cast<double>(*whole);
  if (const auto* number = std::get_if<double>(&v.value)) x = *number;
  if (!std::isfinite(x)) refuse(v, "expected a finite number");
  return x;
}

bool JsonDocument::boolean(const JsonValue& v) const {
  const auto* value = std::get_if<bool>(&v.value);
  if (!value) refuse(v, "expected true or false");
  return *value;
}

uint64_t JsonDocument::hex(const JsonValue& v, int digits) const {
  const std::string& s = string(v);
  uint64_t value = 0;
  bool good = s.size() == static_cast<size_t>(digits);
  for (const char c : s) {
    const bool digit = c >= '0' && c <= '9';
    good = good && (digit || (c >= 'a' && c <= 'f'));
    value = value << 4 | static_cast<uint64_t>(digit ? c - '0' : c - 'a' + 10);
  }
  if (!good) refuse(v, text("{} is not {} lowercase hex digits", json_string(s), digits));
  return value;
}

const JsonValue* JsonDocument::find(const JsonValue& v, std::string_view key) const {
  const JsonObject& members = object(v);
  const auto at = std::lower_bound(members.begin(), members.end(), key,
                                   [](const auto& m, std::string_view k) { return m.key < k; });
  return at != members.end() && at->key == key ? &at->value : nullptr;
}

const JsonValue& JsonDocument::member(const JsonValue& v, std::string_view key) const {
  const JsonValue* found = find(v, key);
  if (!found) refuse(v, text("field {} is missing", json_string(key)));
  return *found;
}

std::string json_string(std::string_view s) {
  // Bytes that are not UTF-8 become U+FFFD, since these texts go into errors too.
  return nlohmann::json(s).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

const char* name_fault(std::string_view name) {
  if (name.empty()) return "an empty name";
  if (name.size() > 4096) return "a name of over 4096 bytes";
  for (const unsigned char c : name) {
    if (c < 32 || c == 127) return "a name with a control character";
  }
  return nullptr;
}

}  // namespace moiety::checkpoint
