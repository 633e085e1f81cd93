// What a command has to say: its result on stdout, as opposed to all else, which goes to stderr.
#pragma once

#include <string_view>

namespace moiety::app {

// Writes to stdout at once. Throws IoError if not all of it could be written: a result that is lost
// is a failure of the command.
void print_result(std::string_view bytes);

}  // namespace moiety::app
