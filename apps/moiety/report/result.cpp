#include "apps/moiety/report/result.h"

#include <cerrno>
#include <cstring>
#include <poll.h>
#include <unistd.h>

#include "moiety/base/error.h"

namespace moiety::app {

void print_result(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(STDOUT_FILENO, bytes.data(), bytes.size());
    if (n > 0) {
      bytes.remove_prefix(static_cast<size_t>(n));
    } else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      pollfd room{STDOUT_FILENO, POLLOUT, 0};  // the shell may have left it non-blocking
      ::poll(&room, 1, -1);
    } else if (n == 0 || errno != EINTR) {
      throw IoError("stdout: the result cannot be written: {}",
                    std::strerror(n == 0 ? ENOSPC : errno));
    }
  }
}

}  // namespace moiety::app
