// `moiety repair CKPT`
#pragma once

#include <string>
#include <vector>

namespace moiety::app {

int repair_command(const std::vector<std::string>& arguments);

}  // namespace moiety::app
