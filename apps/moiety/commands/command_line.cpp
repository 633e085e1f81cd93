#include "apps/moiety/commands/command_line.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <memory>

#include <CLI/CLI.hpp>

#include "apps/moiety/config/options.h"
#include "apps/moiety/exit_code.h"
#include "apps/moiety/report/result.h"
#include "moiety/base/log.h"
#include "moiety/base/number_text.h"
#include "moiety/base/printable.h"

namespace moiety::app {
namespace {

// What shape_of() fills while a command is asked for its options; else null.
thread_local CommandShape* asked_shape = nullptr;
thread_local std::map<const CLI::Option*, std::vector<std::string>> asked_words;

void take_shape(const CLI::App& app, CommandShape& shape) {
  shape.about = app.get_description();
  for (const CLI::Option* option : app.get_options()) {
    const bool is_positional = option->get_positional();
    const bool is_flag = option->get_items_expected_max() == 0;
    OptionShape one;
    one.name = is_positional ? option->get_name(true) : "--" + option->get_lnames().at(0);
    if (!is_flag && !is_positional) one.value = option->get_type_name();
    one.help = option->get_description();
    if (!option->get_default_str().empty()) one.help += " [" + option->get_default_str() + "]";
    one.words = asked_words[option];
    (is_positional ? shape.positionals : shape.options).push_back(std::move(one));
  }
}

[[noreturn]] void refuse(const char* option, std::string_view value, std::string_view wanted) {
  throw UsageError("{} {}: must be {}", option, value.empty() ? "\"\"" : printable(value), wanted);
}

// Parses the whole text as one number that the type holds and the rule allows.
template <class T>
T number_of(const char* option, const std::string& given, const Rule& rule, const char* type) {
  T value{};
  const char* end = given.data() + given.size();
  const auto [at, error] = std::from_chars(given.data(), end, value);
  bool fits = error == std::errc() && at == end;
  if constexpr (!std::is_same_v<T, uint64_t>) fits = fits && rule.allows(value);
  if (fits) return value;
  const std::string range = range_text(rule);
  refuse(option, given, text("{}{}{}", type, range.empty() ? "" : ", ", range));
}

template <class T>
CLI::Option* add_number_of(CLI::App& app, const char* option, T& value, const Rule& rule,
                           const char* type, const std::string& help) {
  std::string standard;
  if constexpr (std::is_same_v<T, double>) {
    standard = number_text(value);
  } else {
    standard = std::to_string(value);
  }
  const auto take = [option, rule, type, &value](const std::string& given) {
    value = number_of<T>(option, given, rule, type);
  };
  return app.add_option_function<std::string>(option, take, help)
      ->type_name(std::is_same_v<T, double> ? "NUMBER" : "N")
      ->default_str(standard);
}

// What an error of the command line's parser says, in words of our own where its are of no help.
std::string parse_error_text(const CLI::App& app, const CLI::ParseError& e) {
  if (dynamic_cast<const CLI::ExtrasError*>(&e)) {
    std::string words;
    for (const std::string& word : app.remaining()) words += (words.empty() ? "" : " ") + word;
    return text("{}: not expected", printable(words));
  }
  for (const CLI::Option* option : app.get_options()) {
    const auto most = static_cast<size_t>(option->get_items_expected_max());
    if (most > 0 && option->results().size() > most) {
      return text("{}: is given {} times", option->get_name(), option->results().size());
    }
  }
  return e.what();
}

}  // namespace

std::vector<std::string> take_overrides(std::vector<std::string>& arguments) {
  std::vector<std::string> overrides;
  if (asked_shape) asked_shape->takes_keys = true;
  const auto is_override = [](const std::string& s) {
    const std::string name = s.substr(0, s.find('='));
    return name.starts_with("--") && name.find('.') != std::string::npos;
  };
  for (size_t i = 0; i + 1 < arguments.size(); ++i) {
    const std::string &key = arguments[i], &next = arguments[i + 1];
    if (!is_override(key) || key.find('=') != std::string::npos || next.starts_with('-')) continue;
    throw UsageError("{0} {1}: a key and its value are one word, {0}={1}", printable(key),
                     printable(next));
  }
  const auto rest = std::stable_partition(arguments.begin(), arguments.end(),
                                          [&](const std::string& s) { return !is_override(s); });
  overrides.assign(rest, arguments.end());
  arguments.erase(rest, arguments.end());
  return overrides;
}

CLI::Option* add_number(CLI::App& app, const char* option, int64_t& value, const Rule& rule,
                        const std::string& help) {
  return add_number_of(app, option, value, rule, "an integer", help);
}

CLI::Option* add_number(CLI::App& app, const char* option, double& value, const Rule& rule,
                        const std::string& help) {
  return add_number_of(app, option, value, rule, "a number", help);
}

CLI::Option* add_number(CLI::App& app, const char* option, std::optional<int64_t>& value,
                        const Rule& rule, const std::string& help) {
  const auto take = [option, rule, &value](const std::string& given) {
    value = number_of<int64_t>(option, given, rule, "an integer");
  };
  return app.add_option_function<std::string>(option, take, help)->type_name("N");
}

CLI::Option* add_seed(CLI::App& app, const char* option, uint64_t& value, const std::string& help) {
  return add_number_of(app, option, value, any(), "an integer, 0..2^64 - 1", help);
}

CLI::Option* add_words(CLI::App& app, const char* option, const Rule& rule,
                       const std::string& standard, const std::string& help,
                       std::function<void(std::string_view word)> take) {
  const auto checked = [option, rule, take](const std::string& given) {
    if (!rule.allows(std::string_view(given))) {
      refuse(option, given, "one of " + range_text(rule));
    }
    take(given);
  };
  CLI::Option* added = app.add_option_function<std::string>(option, checked, help);
  if (asked_shape) asked_words[added] = {rule.choices.begin(), rule.choices.end()};
  return added->type_name("WORD")->default_str(standard);
}

CLI::Option* add_word(CLI::App& app, const char* option, std::string& value, const Rule& rule,
                      const std::string& help) {
  return add_words(app, option, rule, value, help,
                   [&value](std::string_view word) { value = word; });
}

CommandShape shape_of(int (*command)(const std::vector<std::string>&)) {
  CommandShape shape;
  asked_shape = &shape;
  command({});
  asked_shape = nullptr;
  asked_words.clear();
  return shape;
}

void add_device_option(CLI::App& app, std::string& device) {
  const Key& key = find_key("run.device", "command line");
  add_word(app, "--run.device", device, key.rule,
           "where to compute: " + range_text(key.rule) + "; auto: on the GPU, if there is one");
}

void add_threads_option(CLI::App& app, std::optional<int64_t>& threads) {
  add_number(app, "--run.threads", threads, find_key("run.threads", "command line").rule,
             "threads that loops are spread over; 0: all cores, or OMP_NUM_THREADS; without it as "
             "many as a rank of the run had");
}

bool parse_command_line(CLI::App& app, std::vector<std::string> arguments, bool* quiet) {
  bool is_quiet = false;
  LogLevel level = LogLevel::kInfo;
  app.set_version_flag("--version", "moiety " MOIETY_VERSION);
  app.add_flag("--quiet", is_quiet, "warnings and errors alone");
  add_choice<LogLevel>(app, "--log-level", level,
                       {{"debug", LogLevel::kDebug},
                        {"info", LogLevel::kInfo},
                        {"warning", LogLevel::kWarning},
                        {"error", LogLevel::kError}},
                       "debug, info, warning or error");
  if (asked_shape) {
    take_shape(app, *asked_shape);
    return false;
  }
  try {
    std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them from the back
    app.parse(std::move(arguments));
  } catch (const CLI::CallForVersion& e) {
    print_result(std::string(e.what()) + "\n");
    return false;
  } catch (const CLI::CallForHelp&) {
    print_result(app.help());
    return false;
  } catch (const CLI::ParseError& e) {
    throw UsageError("{} ({} --help)", parse_error_text(app, e), app.get_name());
  }
  set_log_level(is_quiet ? LogLevel::kWarning : level);
  if (quiet) *quiet = is_quiet;
  return true;
}

}  // namespace moiety::app
