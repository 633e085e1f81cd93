// Numbers as people write them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace moiety::app {

// A number of things: "1 document", "2 documents", "3 micro-batches". The noun is in the singular.
std::string counted(int64_t n, std::string_view noun);

// A large amount with three digits and its unit: "512", "1.58 M", "30.5 B".
std::string amount_text(double value);

}  // namespace moiety::app
