// `moiety import`: a Hugging Face folder as a checkpoint.
#pragma once

#include <string>
#include <vector>

namespace moiety::app {

int import_command(const std::vector<std::string>& arguments);

}  // namespace moiety::app
