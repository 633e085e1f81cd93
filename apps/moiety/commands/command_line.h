// Arguments of a command, with the flags that every command has: --help, --version, --quiet,
// --log-level. CLI11 is used by the commands' own files only.
#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace moiety::app {

// Splits off --section.key[=value], which load_config parses.
std::vector<std::string> take_overrides(std::vector<std::string>& arguments);

// --run.device with the values that training's key has. `device` is the default; what the run of a
// checkpoint was told does not count, it may have been on another machine.
void add_device_option(CLI::App& app, std::string& device);

// Adds the common flags, parses, and sets the log level (--quiet: warnings and errors alone; more
// in `quiet` for what is not a log line). False: help or version was printed to stdout, and there
// is nothing left to do. Throws UsageError for arguments that do not fit.
bool parse_command_line(CLI::App& app, std::vector<std::string> arguments, bool* quiet = nullptr);

}  // namespace moiety::app
