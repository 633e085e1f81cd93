// Configuration of the trainer: the struct Options, and how values reach it. Keys, types, defaults,
// ranges and help stand in one table, option_table.inc.
//
// Later wins: defaults < model.preset < --config files in order < --section.key=value. A value of
// the command line is parsed as TOML; a string key takes the raw text if that gives no string. An
// integer is accepted for a float, never the reverse; one path for a list of paths. Every error is
// a UsageError that names file:line or argument, key, value and what is allowed.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "moiety/data/sample_source.h"

namespace moiety::app {

struct Options {
#define SECTION(section, help) struct {
#define KEY(section, name, type, value, ...) type name = value;
#define END_SECTION(section) \
  }                          \
  section;
#include "apps/moiety/config/option_table.inc"
};

// What a resume demands of a key: kMust equals the checkpoint's value, kMay differs with a logged
// line, kFree differs silently; kContent is compared by what the files hold (sampler.h).
enum class Resume { kMust, kMay, kFree, kContent };

// The values that a key may have. Numbers of a list, and weights of paths, obey it one by one.
struct Rule {
  static constexpr double kInfinity = std::numeric_limits<double>::infinity();
  double min = -kInfinity;
  double max = kInfinity;
  bool open_min = false;  // min itself is excluded
  bool open_max = false;
  bool zero = false;  // 0 is legal too
  int64_t multiple = 1;
  std::vector<std::string_view> choices;  // of a string; empty: any text

  Rule or_zero() const;
  Rule multiple_of(int64_t m) const;
  Rule without_max() const;
};

struct Key {
  // The key's value in an Options; the alternative is its type.
  using Field = std::variant<bool*, int64_t*, double*, std::string*, std::vector<int64_t>*,
                             std::vector<std::string>*, std::vector<data::WeightedPath>*>;
  std::string_view section, name;
  Field (*field)(Options&);
  Resume resume;
  Rule rule;
  std::string_view unit;
  std::string_view help;

  std::string full_name() const { return std::string(section) + "." + std::string(name); }
};

struct Section {
  std::string_view name, help;
  std::span<const Key> keys;
};

// The table.
std::span<const Key> option_keys();
// Throws UsageError, which begins with `where`, for a name that is not in it: with the nearest
// name, or that it belongs to a later version.
const Key& find_key(std::string_view name, const std::string& where);
const std::vector<Section>& option_sections();

// Options and where each value comes from.
struct Config {
  Options options;
  std::vector<std::string> source;  // by key: "default", "preset tiny", "c.toml:12", "command line"

  Config();
};

// `files` are TOML; `overrides` are arguments as given, "--section.key=value" or "--section.key".
Config load_config(std::span<const std::string> files, std::span<const std::string> overrides);
// The same from TOML text, under the name `path` in errors: how a checkpoint's config is read.
Config parse_config(std::string_view toml, const std::string& path);

// "1..1024", "> 0", "auto | cpu": what the key's rule allows. Empty if everything.
std::string range_text(const Key& key);
// A value as TOML: shortest text that reads back to the same value.
std::string value_text(const Key& key, const Options& options);
std::string type_text(const Key& key);

// --print-config: valid TOML with every key and, as a comment, its source.
std::string print_config(const Config& config);
// Keys grouped with default, range, unit and help: for --help, and as docs/config.md.
std::string options_help();
std::string options_markdown();

}  // namespace moiety::app
