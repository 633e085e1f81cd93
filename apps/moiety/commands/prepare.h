// `moiety prepare`: text or JSONL to token files.
#pragma once

#include <string>
#include <vector>

namespace moiety::app {

// The command, with the arguments behind `prepare`: throws what data::prepare throws, prints the
// summary to stdout, returns the exit code.
int prepare_command(const std::vector<std::string>& arguments);

}  // namespace moiety::app
