// `moiety completion SHELL`
#pragma once

#include <string>
#include <vector>

namespace moiety::app {

int completion_command(const std::vector<std::string>& arguments);

}  // namespace moiety::app
