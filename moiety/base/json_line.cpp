#include "moiety/base/json_line.h"

#include <cmath>

#include <nlohmann/json.hpp>

#include "moiety/base/number_text.h"

namespace moiety {
namespace {

std::string json_string(std::string_view s) {
  return nlohmann::json(s).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string number(double v) {
  const std::string text = number_text(v);
  if (std::isfinite(v)) return text;
  return std::isnan(v) ? "\"nan\"" : json_string(text);
}

}  // namespace

JsonLine& JsonLine::add(std::string_view key, std::string_view value) {
  return raw(key, json_string(value));
}

JsonLine& JsonLine::add(std::string_view key, double value) { return raw(key, number(value)); }

JsonLine& JsonLine::add(std::string_view key, std::span<const double> values) {
  std::string list;
  for (double v : values) list += (list.empty() ? "" : ",") + number(v);
  return raw(key, "[" + list + "]");
}

JsonLine& JsonLine::raw(std::string_view key, std::string_view json) {
  if (body_.size() > 1) body_ += ',';
  body_ += json_string(key);
  body_ += ':';
  body_ += json;
  return *this;
}

JsonLine& JsonLine::append(const JsonLine& other) {
  if (body_.size() > 1 && other.body_.size() > 1) body_ += ',';
  body_ += other.body_.substr(1);
  return *this;
}

}  // namespace moiety
