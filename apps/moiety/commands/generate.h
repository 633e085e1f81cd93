// The command `moiety generate`, which continues a text token by token.
#pragma once

#include <string>
#include <vector>

namespace moiety::app {

int generate_command(const std::vector<std::string>& arguments);

}  // namespace moiety::app
