#include <csignal>
#include <fcntl.h>
#include <unistd.h>

#include "apps/moiety/program.h"

namespace {

// A stream that the caller has closed would be the number of the next file that is opened, and what
// is written to the stream would end there. In its place stands one that refuses.
void occupy_closed_streams() {
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    if (::fcntl(fd, F_GETFD) < 0) ::open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  }
}

}  // namespace

int main(int argc, char** argv) {
  occupy_closed_streams();
  std::signal(SIGXFSZ, SIG_IGN);  // `ulimit -f` is an error of write() then
  return moiety::app::run_program({argv + 1, argv + argc});
}
