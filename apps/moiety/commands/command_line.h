// Arguments of a command, with the flags that every command has: --help, --version, --quiet,
// --log-level. CLI11 is used by the commands' own files only.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/moiety/config/rule.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace moiety::app {

// Takes arguments of the form --section.key[=value] out of `arguments`; load_config parses them.
std::vector<std::string> take_overrides(std::vector<std::string>& arguments);

// Options whose values are numbers: the whole text is one, finite, in the rule's range and not
// rounded to its type. The value before is the default. What does not fit is a UsageError that
// names option, value and range, as for keys of the configuration.
CLI::Option* add_number(CLI::App& app, const char* option, int64_t& value, const Rule& rule,
                        const std::string& help);
CLI::Option* add_number(CLI::App& app, const char* option, double& value, const Rule& rule,
                        const std::string& help);
// The same for one that may be left out: then the value stays empty.
CLI::Option* add_number(CLI::App& app, const char* option, std::optional<int64_t>& value,
                        const Rule& rule, const std::string& help);
// A seed or the number of a draw: any integer of 64 bits.
CLI::Option* add_seed(CLI::App& app, const char* option, uint64_t& value, const std::string& help);

// An option whose value is one of the rule's words.
CLI::Option* add_word(CLI::App& app, const char* option, std::string& value, const Rule& rule,
                      const std::string& help);
// The same, for any use of the word; `standard` is shown as the default.
CLI::Option* add_words(CLI::App& app, const char* option, const Rule& rule,
                       const std::string& standard, const std::string& help,
                       std::function<void(std::string_view word)> take);

// The same, with a value for each word.
template <class E>
CLI::Option* add_choice(CLI::App& app, const char* option, E& value,
                        const std::vector<std::pair<std::string_view, E>>& words,
                        const std::string& help) {
  Rule rule;
  std::string standard;
  for (const auto& [word, of_word] : words) {
    rule.choices.push_back(word);
    if (of_word == value) standard = word;
  }
  return add_words(app, option, rule, standard, help, [&value, words](std::string_view given) {
    for (const auto& [word, of_word] : words) {
      if (word == given) value = of_word;
    }
  });
}

// Adds --run.device, with the values that training's key has. `device` is the default; the device
// of a checkpoint's run does not count, since it may have been on another machine.
void add_device_option(CLI::App& app, std::string& device);

// Adds --run.threads, as training has it; empty if it is not given.
void add_threads_option(CLI::App& app, std::optional<int64_t>& threads);

// A command's options as they are defined, for what is made of them: completion, manual.
struct OptionShape {
  std::string name;                // "--config", or of what comes without a name "CKPT"
  std::string value;               // what stands behind it; empty: a flag
  std::string help;                // one paragraph
  std::vector<std::string> words;  // the values that it may have; empty: any, or a file
};
struct CommandShape {
  std::string about;
  std::vector<OptionShape> positionals, options;
  bool takes_keys = false;  // --section.key=value too
};
// The options of a command, which is run up to the place where it parses its arguments.
CommandShape shape_of(int (*command)(const std::vector<std::string>& arguments));

// Adds the common flags, parses, and sets the log level (--quiet: only warnings and errors; `quiet`
// tells the command, for output that is no log line). False: help or version was printed to stdout,
// and nothing is left to do. Throws UsageError for arguments that do not fit.
bool parse_command_line(CLI::App& app, std::vector<std::string> arguments, bool* quiet = nullptr);

}  // namespace moiety::app
