// Arguments of a command, with the flags that every command has: --help, --version, --quiet,
// --log-level. CLI11 is used by the commands' own files only.
#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace moiety::app {

// Takes arguments of the form --section.key[=value] out of `arguments`; load_config parses them.
std::vector<std::string> take_overrides(std::vector<std::string>& arguments);

// Adds --run.device, with the values that training's key has. `device` is the default; the device
// of a checkpoint's run does not count, since it may have been on another machine.
void add_device_option(CLI::App& app, std::string& device);

// Adds the common flags, parses, and sets the log level (--quiet: only warnings and errors; `quiet`
// tells the command, for output that is no log line). False: help or version was printed to stdout,
// and nothing is left to do. Throws UsageError for arguments that do not fit.
bool parse_command_line(CLI::App& app, std::vector<std::string> arguments, bool* quiet = nullptr);

}  // namespace moiety::app
