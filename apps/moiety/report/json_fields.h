// A reader of one JSON object's fields as raw text, for files of very many small records: a million
// records are read in about a second.
#pragma once

#include <string_view>

namespace moiety::app {

// Walks over the members of an object:
//   JsonFields fields(line);
//   while (fields.next()) use(fields.key(), fields.value());
//   fields.complete() tells whether the text was one object and nothing else.
// A key or a value is the text between its ends: strings with quotes and escapes, arrays and
// objects with brackets. Inside a value only strings and brackets are checked.
class JsonFields {
 public:
  explicit JsonFields(std::string_view text);

  bool next();
  std::string_view key() const { return key_; }  // the key without its quotes
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

// The number that a value holds, also as one of the strings "nan", "inf", "-inf"; anything else
// gives nan.
double json_number(std::string_view value);

}  // namespace moiety::app
