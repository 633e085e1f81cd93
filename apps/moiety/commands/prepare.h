// The command `moiety prepare`, which turns text or JSONL into token files.
#pragma once

#include <string>
#include <vector>

namespace moiety::app {

// Runs the command with the arguments behind its name. Prints the summary to stdout and returns the
// exit code; throws what data::prepare throws.
int prepare_command(const std::vector<std::string>& arguments);

}  // namespace moiety::app
