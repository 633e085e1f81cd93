// `moiety export`: a checkpoint as a Hugging Face folder.
#pragma once

#include <string>
#include <vector>

namespace moiety::app {

int export_command(const std::vector<std::string>& arguments);

}  // namespace moiety::app
