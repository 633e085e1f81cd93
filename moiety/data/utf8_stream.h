// Text that comes in parts, as whole characters.
#pragma once

#include <string>
#include <string_view>

namespace moiety::data {

// Holds a character back until all of its bytes are there. What can be no UTF-8 becomes U+FFFD.
class Utf8Stream {
 public:
  // The characters that are whole with these bytes.
  std::string add(std::string_view bytes);
  // What is left at the end: a character without its end, as U+FFFD, or nothing.
  std::string rest();

 private:
  std::string held_;
};

}  // namespace moiety::data
