#include "apps/moiety/commands/man.h"

#include <CLI/CLI.hpp>

#include "apps/moiety/commands/command_line.h"
#include "apps/moiety/config/options.h"
#include "apps/moiety/exit_code.h"
#include "apps/moiety/program.h"
#include "apps/moiety/report/result.h"

namespace moiety::app {
namespace {

constexpr const char* kManAbout =
    "Prints the manual page of all commands and keys, for man:\n"
    "  moiety man | man -l -";

constexpr std::pair<ExitCode, const char*> kCodes[] = {
    {kExitDone, "done"},
    {kExitInternal, "an error of Moiety's own"},
    {kExitUsage, "usage or configuration"},
    {kExitData, "data that are missing, damaged or do not fit"},
    {kExitDisk, "disk, or a result that could not be written"},
    {kExitCheckpoint, "a checkpoint that cannot be read or does not fit"},
    {kExitNumerical, "stopped by values that are not finite"},
    {kExitComm, "a rank died or stalled"},
    {kExitMemory, "out of memory"},
    {kExitDevice, "the device, or a check of doctor"},
    {kExitStartAgain, "saved and stopped early: start again"},
    {kExitInterrupted, "interrupted twice"},
};

// Text as roff takes it literally.
std::string roff(std::string_view s) {
  std::string out;
  for (const char c : s) {
    const bool begins = out.empty() || out.back() == '\n';
    if (begins && (c == '.' || c == '\'')) out += "\\&";
    if (c == '\\') {
      out += "\\e";
    } else if (c == '-') {
      out += "\\-";
    } else {
      out += c;
    }
  }
  return out;
}

std::string item(const std::string& term, std::string_view what) {
  return text(".TP\n\\fB{}\\fR\n{}\n", roff(term), roff(what));
}

std::string command_text(const Command& command) {
  const CommandShape shape = shape_of(command.run);
  std::string title = text("moiety {}", command.name);
  for (const OptionShape& option : shape.positionals) title += " " + option.name;
  std::string out = text(".SS {}\n{}\n", roff(title), roff(shape.about));
  for (const OptionShape& option : shape.positionals) out += item(option.name, option.help);
  for (const OptionShape& option : shape.options) {
    out += item(option.name + (option.value.empty() ? "" : " " + option.value), option.help);
  }
  return out;
}

std::string keys_text() {
  const Options defaults;
  std::string out =
      ".SH CONFIGURATION\nKeys of TOML files, and of \\fB\\-\\-section.key=value\\fR behind train "
      "and "
      "plan.\n";
  for (const Section& section : option_sections()) {
    out += text(".SS [{}] {}\n", roff(section.name), roff(section.help));
    for (const Key& key : section.keys) {
      const std::string range = range_text(key.rule);
      out += item(text("{} = {}", key.full_name(), value_text(key, defaults)),
                  text("{}{}{}", key.help, range.empty() ? "" : "; ", range));
    }
  }
  return out;
}

}  // namespace

int man_command(const std::vector<std::string>& arguments) {
  CLI::App app(kManAbout, "moiety man");
  if (!parse_command_line(app, arguments)) return kExitDone;
  std::string out = ".TH MOIETY 1 \"\" \"moiety " MOIETY_VERSION
                    "\"\n.SH NAME\nmoiety \\- mixture\\-of\\-experts training\n"
                    ".SH SYNOPSIS\n\\fBmoiety\\fR \\fICOMMAND\\fR ...\n"
                    ".SH COMMANDS\nResults go to standard output, all else to standard error.\n";
  for (const Command& command : commands()) out += command_text(command);
  out += keys_text() + ".SH EXIT STATUS\n";
  for (const auto& [code, meaning] : kCodes) out += item(text("{}", int(code)), meaning);
  print_result(out);
  return kExitDone;
}

}  // namespace moiety::app
