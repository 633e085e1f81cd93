// Numbers as text that reads back to the same value.
#pragma once

#include <string>

namespace moiety {

// The shortest decimal text that reads back to the same number of its type: "0.1", "1e-05", "264",
// "nan".
std::string number_text(double value);
std::string number_text(float value);

}  // namespace moiety
