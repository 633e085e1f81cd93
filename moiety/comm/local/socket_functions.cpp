#include "moiety/comm/local/socket_functions.h"

#include <cstdio>
#include <memory>

#include <climits>

#include "moiety/comm/local/connections.h"
#include "moiety/comm/local/started.h"

namespace moiety::comm::local {
namespace {

constexpr int kNotStarted = 2;

// From `start` to `finish`; only the rank's thread calls the functions between them.
std::unique_ptr<Connections>& connections() {
  static std::unique_ptr<Connections> it;
  return it;
}

const char* library() { return "sockets of one host"; }

void error_text(int code, char* out, int bytes) {
  std::snprintf(out, size_t(bytes), "%s",
                code == Connections::kTooLong ? "a message is longer than expected"
                                              : "this process is no rank, or was one before");
}

int start(int* rank, int* size, int* largest_tag) {
  const Started* place = started();
  static bool once = false;
  if (!place || once) return kNotStarted;
  once = true;
  connections() = std::make_unique<Connections>(place->sockets);
  *rank = place->rank;
  *size = static_cast<int>(place->sockets.size());
  *largest_tag = INT_MAX;
  return 0;
}

// The ranks have met before, and what was sent to others stays in their sockets.
int finish() {
  connections().reset();
  return 0;
}

int send(const void* data, int bytes, int peer, int tag, mpi::Request* request) {
  *request = connections()->send(data, bytes, peer, tag);
  return 0;
}

int receive(void* data, int bytes, int peer, int tag, mpi::Request* request) {
  *request = connections()->receive(data, bytes, peer, tag);
  return 0;
}

int test(mpi::Request* request, int* done) {
  int code = 0;
  *done = connections()->test(*request, &code);
  return code;
}

int cancel(mpi::Request* request) {
  connections()->cancel(*request);
  return 0;
}

int probe(int tag, int* found, int* peer, int* bytes) {
  *found = connections()->probe(tag, peer, bytes);
  return 0;
}

constexpr mpi::Functions kFunctions = {.version = mpi::kFunctionsVersion,
                                       .name = "the connection of ranks",
                                       .library = library,
                                       .error_text = error_text,
                                       .start = start,
                                       .finish = finish,
                                       .send = send,
                                       .receive = receive,
                                       .test = test,
                                       .cancel = cancel,
                                       .probe = probe};

}  // namespace

const mpi::Functions& socket_functions() { return kFunctions; }

}  // namespace moiety::comm::local
