// `moiety import` and `moiety export`: a Hugging Face folder as a checkpoint, and back.
#pragma once

#include <string>
#include <vector>

namespace moiety::app {

int import_command(const std::vector<std::string>& arguments);
int export_command(const std::vector<std::string>& arguments);

}  // namespace moiety::app
