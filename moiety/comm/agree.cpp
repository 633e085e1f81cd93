#include "moiety/comm/agree.h"

namespace moiety::comm {

void agree(Bootstrap& bootstrap, const std::string& error, ErrorKind kind) {
  constexpr size_t kLongest = 32 << 10;  // an all-gather takes 64 KiB at most
  for (const std::string& text : bootstrap.all_gather(error.substr(0, kLongest))) {
    if (!text.empty()) throw_error(kind, text);
  }
}

}  // namespace moiety::comm
