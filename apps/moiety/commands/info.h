// `moiety info PATH`
#pragma once

#include <string>
#include <vector>

namespace moiety::app {

int info_command(const std::vector<std::string>& arguments);

}  // namespace moiety::app
