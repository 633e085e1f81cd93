// A writer of one JSON object on one line, with keys in the order in which they are added: a record
// of metrics.jsonl, a result on stdout. Numbers are the shortest text that reads back to the same
// double; "nan", "inf" and "-inf" are strings.
#pragma once

#include <concepts>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace moiety {

class JsonLine {
 public:
  JsonLine& add(std::string_view key, std::string_view value);
  JsonLine& add(std::string_view key, const char* value) {
    return add(key, std::string_view(value));
  }
  JsonLine& add(std::string_view key, double value);
  template <std::integral I>
  JsonLine& add(std::string_view key, I value) {
    return std::same_as<I, bool> ? raw(key, value ? "true" : "false")
                                 : raw(key, std::to_string(value));
  }
  JsonLine& add(std::string_view key, std::span<const double> values);
  // Adds a value that is JSON text already.
  JsonLine& raw(std::string_view key, std::string_view json);
  // Adds the keys of another object.
  JsonLine& append(const JsonLine& other);

  // The object, "{...}", without a newline.
  std::string text() const { return body_ + "}"; }

 private:
  std::string body_ = "{";
};

}  // namespace moiety
