#include "apps/moiety/report/json_fields.h"

#include <charconv>
#include <limits>

namespace moiety::app {

JsonFields::JsonFields(std::string_view text) : rest_(text) {}

// The next character that is not a space; 0 at the end.
char JsonFields::peek() {
  while (!rest_.empty() && (rest_[0] == ' ' || rest_[0] == '\t' || rest_[0] == '\r')) {
    rest_.remove_prefix(1);
  }
  return rest_.empty() ? '\0' : rest_[0];
}

// A string with its quotes; empty if it does not end.
std::string_view JsonFields::take_string() {
  for (size_t i = 1; i < rest_.size(); ++i) {
    if (rest_[i] == '\\') {
      ++i;
    } else if (rest_[i] == '"') {
      const std::string_view out = rest_.substr(0, i + 1);
      rest_.remove_prefix(i + 1);
      return out;
    }
  }
  return {};
}

std::string_view JsonFields::take_value() {
  const char first = peek();
  if (first == '"') return take_string();
  const std::string_view begin = rest_;
  int depth = 0;
  while (!rest_.empty()) {
    const char c = rest_[0];
    if (c == '"') {
      if (take_string().empty()) return {};
      continue;
    }
    if (c == '[' || c == '{') ++depth;
    if (depth == 0 && (c == ',' || c == '}' || c == ' ')) break;
    if (c == ']' || c == '}') --depth;
    rest_.remove_prefix(1);
  }
  return depth == 0 ? begin.substr(0, begin.size() - rest_.size()) : std::string_view();
}

bool JsonFields::next() {
  const char c = peek();
  if (!first_ && c == '}') {
    rest_.remove_prefix(1);
    complete_ = peek() == '\0';
    return stop();
  }
  if (c != (first_ ? '{' : ',')) return stop();
  rest_.remove_prefix(1);
  if (first_ && peek() == '}') {
    first_ = false;
    return next();
  }
  first_ = false;
  if (peek() != '"') return stop();
  const std::string_view key = take_string();
  if (key.empty() || peek() != ':') return stop();
  rest_.remove_prefix(1);
  value_ = take_value();
  if (value_.empty()) return stop();
  key_ = key.substr(1, key.size() - 2);
  return true;
}

double json_number(std::string_view value) {
  if (value == "\"inf\"") return std::numeric_limits<double>::infinity();
  if (value == "\"-inf\"") return -std::numeric_limits<double>::infinity();
  double out = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), out);
  return error == std::errc() && end == value.data() + value.size()
             ? out
             : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace moiety::app
