// The fields of one JSON object as raw text, for files of very many small records: records of a
// million steps are read in about a second.
#pragma once

#include <string_view>

namespace moiety {

// Walks over the members of an object.
//   JsonFields fields(line);
//   while (fields.next()) use(fields.key(), fields.value());
//   fields.complete() tells whether the text was one object and nothing else.
// Keys and values are the text between their ends: strings with quotes and escapes, arrays and
// objects with brackets. What stands inside a value is not checked but for strings and brackets.
class JsonFields {
 public:
  explicit JsonFields(std::string_view text);

  bool next();
  std::string_view key() const { return key_; }  // without quotes
  std::string_view value() const { return value_; }
  bool complete() const { return complete_; }

 private:
  char peek();
  std::string_view take_string();
  std::string_view take_value();
  bool stop() {
    rest_ = {};
    return false;
  }

  std::string_view rest_;
  std::string_view key_, value_;
  bool first_ = true, complete_ = false;
};

// A number, or "nan", "inf", "-inf" as a string. Anything else is nan.
double json_number(std::string_view value);

}  // namespace moiety
