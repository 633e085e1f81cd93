// Texts of others, such as values and names from files, as a part of one line for people.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace moiety {

// The text with control characters escaped ("\n", "\x1b"); of one longer than `most` bytes the
// beginning and the end, with the number of the bytes between. Characters of UTF-8 stay whole.
std::string printable(std::string_view s, size_t most = 200);

// What a parser's exception says, printable, without the name and number in brackets with which the
// JSON parser begins.
std::string parser_text(std::string_view what);

}  // namespace moiety
