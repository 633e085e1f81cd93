// The command `moiety plot`, which draws curves of one or several runs in one picture.
#pragma once

#include <string>
#include <vector>

namespace moiety::app {

int plot_command(const std::vector<std::string>& arguments);

}  // namespace moiety::app
