// The program: the choice of the command, and the end of all errors.
#pragma once

#include <span>
#include <string>
#include <vector>

namespace moiety::app {

struct Command {
  const char* name;
  const char* help;
  int (*run)(const std::vector<std::string>& arguments);
};
std::span<const Command> commands();

// Runs the command. `arguments` are those behind the program's name. An error becomes the last line
// on stderr and an exit code (docs/reliability.md#exit-codes).
int run_program(const std::vector<std::string>& arguments);

}  // namespace moiety::app
