#include "apps/moiety/config/options.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <fstream>
#include <sstream>

#include <toml++/toml.h>

#include "apps/moiety/config/model_options.h"
#include "apps/moiety/exit_code.h"
#include "moiety/data/documents.h"

namespace moiety::app {
namespace {

template <class List>
bool contains(const List& list, std::string_view name) {
  return std::find(std::begin(list), std::end(list), name) != std::end(list);
}

// A value on its way to its key.
struct Entry {
  const Key* key;
  const toml::node* value;
  std::string raw;     // text of an argument's value
  std::string source;  // for --print-config
  std::string where;   // place, for errors
};

std::string shown(const toml::node& node) {
  if (node.is_table()) return "{...}";
  std::ostringstream out;
  node.visit([&](const auto& value) { out << value; });
  return out.str();
}

[[noreturn]] void refuse(const Entry& entry, const std::string& value) {
  const std::string range = range_text(*entry.key);
  const bool choice = !entry.key->rule.choices.empty();
  throw UsageError("{}: {} = {}: must be {}{}", entry.where, entry.key->full_name(), value,
                   choice ? "one of" : type_text(*entry.key),
                   range.empty() ? "" : (choice ? " " : ", ") + range);
}

bool allows(const Rule& rule, double v) {
  if (rule.zero && v == 0) return true;
  if (!std::isfinite(v) || v < rule.min || v > rule.max) return false;
  return !(rule.open_min && v == rule.min) && !(rule.open_max && v == rule.max);
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
    if (!v || !allows(rule(), double(v->get())) || v->get() % rule().multiple != 0) refuse();
    return v->get();
  }
  double number(const toml::node& node) const {
    const auto v = node.is_number() ? node.value<double>() : std::nullopt;
    if (!v || !allows(rule(), *v)) refuse();
    return *v;
  }
  std::string string(const toml::node& node) const {
    const auto* v = node.as_string();
    if (!v) refuse();
    const std::string& s = v->get();
    if (!rule().choices.empty() && !contains(rule().choices, s)) refuse();
    const auto control = [](char c) { return uint8_t(c) < 32 || c == 127; };
    if (data::find_bad_utf8(s) != std::string::npos || std::any_of(s.begin(), s.end(), control)) {
      throw UsageError("{}: {}: not UTF-8, or with control characters", entry_.where,
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

// Collects the values of all sources, then applies them in their order.
class Loader {
 public:
  void add_toml(std::string_view toml, const std::string& path) {
    const toml::table& root = parse(toml, path);
    for (const auto& [section, node] : root) {
      const std::string where = place(path, node);
      const toml::table* keys = node.as_table();
      if (!keys) {
        throw UsageError("{}: '{}' stands outside a section such as [model]", where, section.str());
      }
      for (const auto& [name, value] : *keys) {
        const std::string at = place(path, value);
        const std::string full = std::string(section.str()) + "." + std::string(name.str());
        entries_.push_back({&find_key(full, at), &value, {}, at, at});
      }
    }
  }

  void add_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream content;
    content << file.rdbuf();
    if (!file) throw UsageError("{}: the config file cannot be read", path);
    add_toml(content.str(), path);
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
    if (!entry.value) refuse(entry, entry.raw);
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
    try {
      return tables_.emplace_back(toml::parse(toml, path));
    } catch (const toml::parse_error& e) {
      throw UsageError("{}:{}: {}", path, e.source().begin.line, e.description());
    }
  }

  // The value of an argument, or null if it is not one TOML value.
  const toml::node* parse_value(const std::string& raw) {
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
