#include "apps/moiety/config/options.h"

#include <algorithm>
#include <deque>
#include <sstream>

#include <toml++/toml.h>

#include "apps/moiety/config/model_options.h"
#include "apps/moiety/exit_code.h"
#include "apps/moiety/input_file.h"
#include "moiety/base/number_text.h"
#include "moiety/base/printable.h"
#include "moiety/data/documents.h"

namespace moiety::app {
namespace {

constexpr int64_t kMostBytes = 1 << 20;  // of a config file
// The parser descends once for each part of a dotted key, so a long one would overflow its stack.
constexpr int kMostDots = 8;

// A value on its way to its key.
struct Entry {
  const Key* key;
  const toml::node* value;
  std::string raw;     // text of an argument's value
  std::string source;  // for --print-config
  std::string where;   // place, for errors
};

// A value as it is said in errors: in one line, and short.
std::string shown(const toml::node& node) {
  if (node.is_table()) return "{...}";
  if (const auto* number = node.as_floating_point()) {
    const std::string s = number_text(number->get());
    return s.find_first_of(".en") == s.npos ? s + ".0" : s;
  }
  std::ostringstream out;
  node.visit([&](const auto& value) { out << value; });
  std::string line = std::move(out).str();
  for (size_t at;
       (at = line.find("\n")) != line.npos;) {  // arrays of tables are printed over lines
    line.replace(at, std::min(line.find_first_not_of("\n ", at), line.size()) - at, " ");
  }
  return printable(line);
}

[[noreturn]] void refuse(const Entry& entry, const std::string& value) {
  const std::string range = range_text(entry.key->rule);
  const bool choice = !entry.key->rule.choices.empty();
  throw UsageError("{}: {} = {}: must be {}{}", printable(entry.where), entry.key->full_name(),
                   value, choice ? "one of" : type_text(*entry.key),
                   range.empty() ? "" : (choice ? " " : ", ") + range);
}

// Stores a node in a field of its type, or refuses it.
class Assign {
 public:
  Assign(const Entry& entry, const toml::node& node) : entry_(entry), node_(node) {}

  void operator()(bool* field) const {
    const auto* v = node_.as_boolean();
    if (!v) refuse();
    *field = v->get();
  }
  void operator()(int64_t* field) const { *field = integer(node_); }
  void operator()(double* field) const { *field = number(node_); }
  void operator()(std::optional<double>* field) const {
    const auto* word = node_.as_string();
    *field = word && word->get().empty() ? std::nullopt : std::optional(number(node_));
  }
  void operator()(std::string* field) const { *field = string(node_); }
  void operator()(std::vector<int64_t>* field) const {
    const auto* list = node_.as_array();
    if (!list) refuse();
    field->clear();
    for (const toml::node& item : *list) field->push_back(integer(item));
  }
  void operator()(std::vector<std::string>* field) const {
    field->clear();
    each([&](const toml::node& item) { field->push_back(string(item)); });
  }
  void operator()(std::vector<data::WeightedPath>* field) const {
    field->clear();
    each([&](const toml::node& item) { field->push_back(weighted_path(item)); });
  }

 private:
  [[noreturn]] void refuse() const { app::refuse(entry_, shown(node_)); }
  const Rule& rule() const { return entry_.key->rule; }

  int64_t integer(const toml::node& node) const {
    const auto* v = node.as_integer();
    if (!v || !rule().allows(v->get())) refuse();
    return v->get();
  }
  double number(const toml::node& node) const {
    const auto v = node.is_number() ? node.value<double>() : std::nullopt;
    if (!v || !rule().allows(*v)) refuse();
    return *v;
  }
  std::string string(const toml::node& node) const {
    const auto* v = node.as_string();
    if (!v) refuse();
    const std::string& s = v->get();
    if (!rule().allows(std::string_view(s))) refuse();
    const auto control = [](char c) { return uint8_t(c) < 32 || c == 127; };
    if (data::find_bad_utf8(s) != std::string::npos || std::any_of(s.begin(), s.end(), control)) {
      throw UsageError("{}: {}: not UTF-8, or with control characters", printable(entry_.where),
                       entry_.key->full_name());
    }
    return s;
  }
  data::WeightedPath weighted_path(const toml::node& node) const {
    const auto* table = node.as_table();
    if (!table) return {string(node)};
    const toml::node* path = table->get("path");
    const toml::node* weight = table->get("weight");
    if (!path || table->size() != (weight ? 2u : 1u)) refuse();
    return {string(*path), weight ? number(*weight) : 1.0};
  }
  // A single value stands for a list of one.
  template <class Take>
  void each(Take take) const {
    const auto* list = node_.as_array();
    if (!list) return take(node_);
    for (const toml::node& item : *list) take(item);
  }

  const Entry& entry_;
  const toml::node& node_;
};

// The index behind the string that begins at `at`, or the end of the text.
size_t end_of_string(std::string_view toml, size_t at) {
  const char quote = toml[at];
  const std::string_view three = quote == '"' ? R"(""")" : "'''";
  const bool lines = toml.substr(at).starts_with(three);
  const std::string_view end = lines ? three : three.substr(0, 1);
  for (at += end.size(); at < toml.size(); ++at) {
    if (toml.substr(at).starts_with(end)) return at + end.size();
    if (quote == '"' && toml[at] == '\\') ++at;
    if (!lines && at < toml.size() && toml[at] == '\n') break;  // not ended: the parser refuses it
  }
  return std::min(at, toml.size());  // a last backslash has nothing behind it
}

// The line of the first key of too many parts; 0 if there is none.
int line_of_deep_key(std::string_view toml) {
  int line = 1, dots = 0;
  for (size_t at = 0; at < toml.size();) {
    const char c = toml[at];
    const size_t begin = at++;
    if (c == '#') at = std::min(toml.find('\n', at), toml.size());
    if (c == '"' || c == '\'') at = end_of_string(toml, begin);
    line += int(std::count(toml.begin() + ptrdiff_t(begin), toml.begin() + ptrdiff_t(at), '\n'));
    if (std::string_view("=,[]{}\n").find(c) != std::string_view::npos) dots = 0;
    if (c == '.' && ++dots == kMostDots) return line;
  }
  return 0;
}

// Collects the values of all sources, then applies them in their order.
class Loader {
 public:
  void add_toml(std::string_view toml, const std::string& path) {
    const toml::table& root = parse(toml, path);
    for (const auto& [section, node] : root) {
      const std::string where = place(path, node);
      const toml::table* keys = node.as_table();
      if (!keys) {
        throw UsageError("{}: '{}' stands outside a section such as [model]", where,
                         printable(section.str()));
      }
      for (const auto& [name, value] : *keys) {
        const std::string at = place(path, value);
        const std::string full = std::string(section.str()) + "." + std::string(name.str());
        entries_.push_back({&find_key(full, at), &value, {}, at, at});
      }
    }
  }

  void add_file(const std::string& path) {
    add_toml(read_file(path, kMostBytes, ErrorKind::kUsage), path);
  }

  void add_argument(const std::string& argument) {
    const size_t equals = argument.find('=');
    const std::string name = argument.substr(2, equals == std::string::npos ? equals : equals - 2);
    const Key& key = find_key(name, argument);
    Entry entry{&key, nullptr, "true", "command line", argument};
    if (equals != std::string::npos) entry.raw = argument.substr(equals + 1);
    Options probe;
    const Key::Field field = key.field(probe);
    const bool is_text = std::holds_alternative<std::string*>(field) ||
                         std::holds_alternative<std::vector<std::string>*>(field) ||
                         std::holds_alternative<std::vector<data::WeightedPath>*>(field);
    entry.value = parse_value(entry.raw);
    if (is_text && (!entry.value || !(entry.value->is_string() || entry.value->is_array() ||
                                      entry.value->is_table()))) {
      entry.value = &texts_.emplace_back(entry.raw);
    }
    if (!entry.value && entry.raw.empty() && key.rule.none) entry.value = &texts_.emplace_back("");
    if (!entry.value) refuse(entry, printable(entry.raw));
    entries_.push_back(std::move(entry));
  }

  Config load() const {
    Config config;
    for (const Entry& entry : entries_) {
      if (entry.key->full_name() == "model.preset") apply(entry, config);
    }
    const std::string preset = "preset " + config.options.model.preset;
    Loader from_preset;
    from_preset.add_toml(preset_toml(config.options.model.preset), preset);
    for (Entry& entry : from_preset.entries_) {
      entry.source = preset;
      apply(entry, config);
    }
    for (const Entry& entry : entries_) apply(entry, config);
    return config;
  }

 private:
  static std::string place(const std::string& path, const toml::node& node) {
    return path + ":" + std::to_string(node.source().begin.line);
  }

  const toml::table& parse(std::string_view toml, const std::string& path) {
    if (const int line = line_of_deep_key(toml)) {
      throw UsageError("{}:{}: a key of more than {} parts", path, line, kMostDots);
    }
    try {
      return tables_.emplace_back(toml::parse(toml, path));
    } catch (const toml::parse_error& e) {
      throw UsageError("{}:{}: {}", path, e.source().begin.line, printable(e.description()));
    }
  }

  // The value of an argument, or null if it is not one TOML value.
  const toml::node* parse_value(const std::string& raw) {
    if (line_of_deep_key(raw)) return nullptr;
    try {
      const toml::table& table = tables_.emplace_back(toml::parse("value = " + raw));
      return table.size() == 1 ? table.get("value") : nullptr;
    } catch (const toml::parse_error&) {
      return nullptr;
    }
  }

  static void apply(const Entry& entry, Config& config) {
    std::visit(Assign(entry, *entry.value), entry.key->field(config.options));
    config.source[entry.key - option_keys().data()] = entry.source;
  }

  std::vector<Entry> entries_;
  std::deque<toml::table> tables_;  // the tables that the entries point into
  std::deque<toml::value<std::string>> texts_;
};

}  // namespace

Config::Config() : source(option_keys().size(), "default") {}

Config load_config(std::span<const std::string> files, std::span<const std::string> overrides) {
  Loader loader;
  for (const std::string& file : files) loader.add_file(file);
  for (const std::string& argument : overrides) loader.add_argument(argument);
  return loader.load();
}

Config parse_config(std::string_view toml, const std::string& path) {
  Loader loader;
  loader.add_toml(toml, path);
  return loader.load();
}

}  // namespace moiety::app
