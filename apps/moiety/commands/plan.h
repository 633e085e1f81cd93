// The command `moiety plan`, which tells from shapes alone how a step would run under a layout.
#pragma once

#include <string>
#include <vector>

namespace moiety::app {

// Runs the command with the arguments behind its name; returns the exit code. Throws UsageError.
int plan_command(const std::vector<std::string>& arguments);

}  // namespace moiety::app
