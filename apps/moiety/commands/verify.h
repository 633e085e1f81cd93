// `moiety verify PATH...`
#pragma once

#include <string>
#include <vector>

namespace moiety::app {

int verify_command(const std::vector<std::string>& arguments);

}  // namespace moiety::app
