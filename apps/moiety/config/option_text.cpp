// The table of keys as text for people: ranges, --print-config, --help, docs/config.md.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "apps/moiety/config/options.h"
#include "moiety/base/format.h"
#include "moiety/base/number_text.h"

namespace moiety::app {
namespace {

// Writes 1e+06 as "1e6".
std::string plain_exponent(std::string s) {
  const size_t e = s.find('e');
  if (e == std::string::npos) return s;
  const size_t digits = s.find_first_not_of("+-0", e + 1);
  return s.substr(0, e + 1) + (s[e + 1] == '-' ? "-" : "") + s.substr(digits);
}

std::string toml_float(double v) {
  const std::string s = plain_exponent(number_text(v));
  return s.find_first_of(".e") == std::string::npos ? s + ".0" : s;
}

std::string toml_string(std::string_view s) {
  std::string out = "\"";
  for (char c : s) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;  // control characters are refused when a value is set
  }
  return out + '"';
}

std::string toml_path(const data::WeightedPath& p) {
  if (p.weight == 1) return toml_string(p.path);
  return text("{{path = {}, weight = {}}}", toml_string(p.path), toml_float(p.weight));
}

template <class T, class Item>
std::string toml_array(const std::vector<T>& list, Item item) {
  std::string out = "[";
  for (const T& x : list) out += (out.size() > 1 ? ", " : "") + item(x);
  return out + "]";
}

struct ValueText {
  std::string operator()(const bool* v) const { return *v ? "true" : "false"; }
  std::string operator()(const int64_t* v) const { return std::to_string(*v); }
  std::string operator()(const double* v) const { return toml_float(*v); }
  std::string operator()(const std::optional<double>* v) const {
    return *v ? toml_float(**v) : toml_string("");
  }
  std::string operator()(const std::string* v) const { return toml_string(*v); }
  std::string operator()(const std::vector<int64_t>* v) const {
    return toml_array(*v, [](int64_t x) { return std::to_string(x); });
  }
  std::string operator()(const std::vector<std::string>* v) const {
    return toml_array(*v, toml_string);
  }
  std::string operator()(const std::vector<data::WeightedPath>* v) const {
    return toml_array(*v, toml_path);
  }
};

std::string resume_text(const Key& key) {
  static constexpr const char* kTexts[] = {"must be equal", "may change, logged", "free",
                                           "same contents"};
  const char* by_host = key.among_ranks == AmongRanks::kByHost ? ", by host" : "";
  return std::string(kTexts[static_cast<size_t>(key.resume)]) + by_host;
}

// A cell of a table; a '|' would end it.
std::string cell(std::string s) {
  for (size_t at = 0; (at = s.find('|', at)) != std::string::npos; at += 2) s.insert(at, 1, '\\');
  return s;
}

}  // namespace

std::string type_text(const Key& key) {
  Options options;
  static constexpr const char* kNames[] = {"true or false",
                                           "an integer",
                                           "a number",
                                           "a string",
                                           "a list of integers",
                                           "a list of paths",
                                           "a list of paths or {path, weight}",
                                           "a number"};
  return kNames[key.field(options).index()];
}

std::string value_text(const Key& key, const Options& options) {
  // The pointer is only used for reading.
  return std::visit(ValueText{}, key.field(const_cast<Options&>(options)));
}

std::string print_config(const Config& config) {
  std::string out;
  size_t i = 0;
  for (const Section& section : option_sections()) {
    out += text("{}[{}]\n", i == 0 ? "" : "\n", section.name);
    for (const Key& key : section.keys) {
      const std::string line = text("{} = {}", key.name, value_text(key, config.options));
      out += text("{:<40}  # {}\n", line, config.source[i++]);
    }
  }
  return out;
}

std::string options_help() {
  const Options defaults;
  std::string out;
  for (const Section& section : option_sections()) {
    out += text("\n[{}] {}\n", section.name, section.help);
    for (const Key& key : section.keys) {
      std::string limits = range_text(key.rule);
      if (!key.unit.empty()) limits = std::string(key.unit) + (limits.empty() ? "" : ", " + limits);
      const std::string left = text("--{}={}", key.full_name(), value_text(key, defaults));
      out += text("  {:<34}  {}{}\n", left, key.help, limits.empty() ? "" : " [" + limits + "]");
    }
  }
  return out;
}

std::string options_markdown() {
  const Options defaults;
  std::string out =
      "# Configuration\n\n"
      "Written by `moiety train --help=markdown` from the table in\n"
      "`apps/moiety/config/option_table.inc`; a test compares.\n\n"
      "TOML files (`--config`, several are read in order) hold these keys; `--section.key=value`\n"
      "on the command line comes last. `moiety train --print-config ...` prints every key with\n"
      "its value and where it comes from. The last column but one says what a run that continues\n"
      "from a checkpoint demands; `by host` are keys that may differ among the ranks of a run, "
      "which\n"
      "compare what the values mean. All other keys must be the same on all ranks.\n";
  for (const Section& section : option_sections()) {
    out += text("\n## [{}]\n\n{}.\n\n", section.name, section.help);
    out += "| key | default | range | unit | resume | |\n|---|---|---|---|---|---|\n";
    for (const Key& key : section.keys) {
      out +=
          text("| `{}` | `{}` | {} | {} | {} | {} |\n", key.name, value_text(key, defaults),
               cell(range_text(key.rule)), key.unit, resume_text(key), cell(std::string(key.help)));
    }
  }
  return out;
}

}  // namespace moiety::app
