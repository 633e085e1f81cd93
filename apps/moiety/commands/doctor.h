// The command `moiety doctor`: the checks of moiety/train/health.h, in words.
#pragma once

#include <string>
#include <vector>

namespace moiety::app {

// Runs the command with the arguments behind its name; returns the exit code.
int doctor_command(const std::vector<std::string>& arguments);

}  // namespace moiety::app
