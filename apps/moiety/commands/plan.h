// `moiety plan`: what a layout would do to a step, from shapes alone.
#pragma once

#include <string>
#include <vector>

namespace moiety::app {

// With the arguments behind the command's name; returns the exit code. Throws UsageError.
int plan_command(const std::vector<std::string>& arguments);

}  // namespace moiety::app
