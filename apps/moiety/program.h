// The program: which command, and where all errors end.
#pragma once

#include <string>
#include <vector>

namespace moiety::app {

// `arguments` are those behind the program's name. An error becomes the last line on stderr and an
// exit code (docs/reliability.md#exit-codes).
int run_program(const std::vector<std::string>& arguments);

}  // namespace moiety::app
