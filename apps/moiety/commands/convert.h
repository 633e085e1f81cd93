// `moiety convert`: a checkpoint with its experts in another form.
#pragma once

#include <string>
#include <vector>

namespace moiety::app {

int convert_command(const std::vector<std::string>& arguments);

}  // namespace moiety::app
