// `moiety doctor`: the checks of moiety/train/health.h, in words.
#pragma once

#include <string>
#include <vector>

namespace moiety::app {

// With the arguments behind the command's name; returns the exit code.
int doctor_command(const std::vector<std::string>& arguments);

}  // namespace moiety::app
