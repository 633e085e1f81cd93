// `moiety man`
#pragma once

#include <string>
#include <vector>

namespace moiety::app {

int man_command(const std::vector<std::string>& arguments);

}  // namespace moiety::app
