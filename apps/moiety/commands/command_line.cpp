#include "apps/moiety/commands/command_line.h"

#include <algorithm>
#include <map>

#include <CLI/CLI.hpp>

#include "apps/moiety/config/options.h"
#include "apps/moiety/exit_code.h"
#include "moiety/base/log.h"

namespace moiety::app {

std::vector<std::string> take_overrides(std::vector<std::string>& arguments) {
  std::vector<std::string> overrides;
  const auto is_override = [](const std::string& s) {
    const std::string name = s.substr(0, s.find('='));
    return name.starts_with("--") && name.find('.') != std::string::npos;
  };
  const auto rest = std::stable_partition(arguments.begin(), arguments.end(),
                                          [&](const std::string& s) { return !is_override(s); });
  overrides.assign(rest, arguments.end());
  arguments.erase(rest, arguments.end());
  return overrides;
}

void add_device_option(CLI::App& app, std::string& device) {
  const Key& key = find_key("run.device", "command line");
  const std::vector<std::string> choices(key.rule.choices.begin(), key.rule.choices.end());
  app.add_option("--run.device", device,
                 "where to compute: " + range_text(key) + "; auto: on the GPU, if there is one")
      ->check(CLI::IsMember(choices).description(""))
      ->capture_default_str();
}

bool parse_command_line(CLI::App& app, std::vector<std::string> arguments, bool* quiet) {
  bool is_quiet = false;
  LogLevel level = LogLevel::kInfo;
  const std::map<std::string, LogLevel> levels{{"debug", LogLevel::kDebug},
                                               {"info", LogLevel::kInfo},
                                               {"warning", LogLevel::kWarning},
                                               {"error", LogLevel::kError}};
  app.set_version_flag("--version", "moiety " MOIETY_VERSION);
  app.add_flag("--quiet", is_quiet, "warnings and errors alone");
  app.add_option("--log-level", level, "debug, info, warning or error")
      ->type_name("LEVEL")
      ->transform(CLI::CheckedTransformer(levels, CLI::ignore_case).description(""));
  try {
    std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them from the back
    app.parse(std::move(arguments));
  } catch (const CLI::Success& e) {
    app.exit(e);  // prints help or version
    return false;
  } catch (const CLI::ParseError& e) {
    throw UsageError("{} ({} --help)", e.what(), app.get_name());
  }
  set_log_level(is_quiet ? LogLevel::kWarning : level);
  if (quiet) *quiet = is_quiet;
  return true;
}

}  // namespace moiety::app
