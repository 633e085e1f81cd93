#include "moiety/comm/local/started.h"

#include <charconv>
#include <cstdlib>
#include <fcntl.h>
#include <memory>
#include <string_view>
#include <sys/socket.h>
#include <sys/stat.h>

#include "moiety/base/error.h"
#include "moiety/comm/local_group.h"

namespace moiety::comm {
namespace local {
namespace {

// Takes a number and what follows it off the front of the text.
int take_number(std::string_view& rest, std::string_view behind, const std::string& whole) {
  int out = 0;
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), out);
  const size_t length = size_t(end - rest.data());
  if (error != std::errc() || rest.substr(length, behind.size()) != behind) {
    throw UsageError("{} = {}: is set by moiety for the processes that it starts: unset it",
                     kVariable, whole);
  }
  rest.remove_prefix(length + behind.size());
  return out;
}

bool is_socket(int descriptor) {
  struct stat s {};
  return ::fstat(descriptor, &s) == 0 && S_ISSOCK(s.st_mode);
}

std::unique_ptr<const Started> read_environment() {
  const char* value = std::getenv(kVariable);
  if (!value) return nullptr;
  const std::string whole = value;
  auto out = std::make_unique<Started>(from_text(whole));
  ::unsetenv(kVariable);
  std::vector<int> all = out->sockets;
  all[size_t(out->rank)] = out->report;
  for (const int descriptor : all) {
    if (!is_socket(descriptor)) {
      throw UsageError("{} = {}: descriptor {} is no socket: unset it", kVariable, whole,
                       descriptor);
    }
    ::fcntl(descriptor, F_SETFD, FD_CLOEXEC);
  }
  return out;
}

}  // namespace

std::string to_text(const Started& started) {
  std::string out = text("{}/{}:{}:", started.rank, started.sockets.size(), started.report);
  for (const int socket : started.sockets) out += text("{},", socket);
  return out;
}

Started from_text(const std::string& whole) {
  std::string_view rest = whole;
  Started out;
  out.rank = take_number(rest, "/", whole);
  const int ranks = take_number(rest, ":", whole);
  out.report = take_number(rest, ":", whole);
  while (!rest.empty()) out.sockets.push_back(take_number(rest, ",", whole));
  if (out.rank < 0 || out.rank >= ranks || std::ssize(out.sockets) != ranks) {
    throw UsageError("{} = {}: is set by moiety for the processes that it starts: unset it",
                     kVariable, whole);
  }
  return out;
}

const Started* started() {
  static const std::unique_ptr<const Started> place = read_environment();
  return place.get();
}

}  // namespace local

bool is_started_rank() { return local::started() != nullptr; }

bool report_failure(const std::string& why) {
  const local::Started* place = local::started();
  if (!place) return false;
  // The socket takes as much at once; the parent reads when this process has ended.
  constexpr size_t kLongest = 32 << 10;
  const std::string sent = why.substr(0, kLongest);
  return ::send(place->report, sent.data(), sent.size(), MSG_NOSIGNAL | MSG_DONTWAIT) ==
         std::ssize(sent);
}

}  // namespace moiety::comm
