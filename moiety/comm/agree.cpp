#include "moiety/comm/agree.h"

#include "moiety/base/format.h"

namespace moiety::comm {

void agree(Bootstrap& bootstrap, const std::string& error, ErrorKind kind) {
  constexpr size_t kLongest = 32 << 10;  // an all-gather takes 64 KiB at most
  for (const std::string& its : bootstrap.all_gather(error.substr(0, kLongest))) {
    if (!its.empty()) throw_error(kind, its);
  }
}

void agree_on(Bootstrap& bootstrap, const std::string& what, const std::string& doing,
              ErrorKind kind, const std::function<void()>& step) {
  std::string error;
  try {
    step();
  } catch (const Error& e) {
    error = text("{}: rank {} could not {}: {}", what, bootstrap.rank(), doing, e.what());
  }
  agree(bootstrap, error, kind);
}

}  // namespace moiety::comm
