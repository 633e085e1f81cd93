// The configuration of the trainer: the struct Options, and the ways in which it gets values. Keys,
// types, defaults, ranges and help stand in one table, option_table.inc.
//
// Later sources win: defaults < model.preset < --config files in order < --section.key=value. A
// value of the command line is parsed as TOML; a string key takes the raw text if that gives no
// string. An integer is accepted for a float, never the reverse; one path is accepted for a list of
// paths, and "" for a number that need not be given. Every error is a UsageError that names file:line or argument, key, value and the allowed
// values.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "apps/moiety/config/rule.h"
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

// The demand of a resumed run on a key: kMust equals the checkpoint's value, kMay differs with a
// logged line, kFree differs silently; kContent is compared by the contents of the files
// (sampler.h).
enum class Resume { kMust, kMay, kFree, kContent };

// The demand of a run's ranks on a key: kSame has one value on all of them; kByHost may differ, as
// paths and devices do, and what it means is compared instead (ranks.h).
enum class AmongRanks { kSame, kByHost };

struct Key {
  // A pointer to the key's value in an Options; the alternative tells its type.
  using Field = std::variant<bool*, int64_t*, double*, std::string*, std::vector<int64_t>*,
                             std::vector<std::string>*, std::vector<data::WeightedPath>*,
                             std::optional<double>*>;
  std::string_view section, name;
  Field (*field)(Options&);
  Resume resume;
  AmongRanks among_ranks;
  Rule rule;  // the numbers of a list, and the weights of paths, obey it one by one
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
// The key of this name. If there is none, throws UsageError, which begins with `where` and names
// the nearest key, or says that the key belongs to a later version.
const Key& find_key(std::string_view name, const std::string& where);
const std::vector<Section>& option_sections();

// Options, with the source of each value.
struct Config {
  Options options;
  std::vector<std::string> source;  // by key: "default", "preset tiny", "c.toml:12", "command line"

  Config();
};

// Loads a configuration. `files` are TOML; `overrides` are arguments as given,
// "--section.key=value" or "--section.key".
Config load_config(std::span<const std::string> files, std::span<const std::string> overrides);
// The same from TOML text, with the name `path` in errors: a checkpoint's config is read this way.
Config parse_config(std::string_view toml, const std::string& path);

// A value as TOML: the shortest text that reads back to the same value.
std::string value_text(const Key& key, const Options& options);
std::string type_text(const Key& key);

// The text of --print-config: valid TOML with every key and, as a comment, its source.
std::string print_config(const Config& config);
// The keys grouped, with default, range, unit and help: for --help, and as docs/config.md.
std::string options_help();
std::string options_markdown();

}  // namespace moiety::app
