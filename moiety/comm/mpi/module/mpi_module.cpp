// libmoiety_mpi.so: the only code that is compiled against mpi.h.
#include <cstdio>
#include <cstring>
#include <mpi.h>

#include "moiety/comm/mpi/functions.h"

namespace moiety::comm::mpi {
namespace {

static_assert(sizeof(MPI_Request) <= sizeof(Request));
constexpr int kThreadLevel = -1;  // an error of this module's own

MPI_Comm g_comm = MPI_COMM_NULL;
bool g_started_here = false;

MPI_Request load(const Request* from) {
  MPI_Request out;
  std::memcpy(&out, from, sizeof(out));
  return out;
}

void store(Request* to, MPI_Request from) { std::memcpy(to, &from, sizeof(from)); }

const char* library() {
  static char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  if (MPI_Get_library_version(text, &length) != MPI_SUCCESS) return "an MPI without a version";
  return text;
}

void error_text(int code, char* out, int bytes) {
  char text[MPI_MAX_ERROR_STRING] = "MPI has no support for threads";
  int length = 0;
  if (code != kThreadLevel && MPI_Error_string(code, text, &length) != MPI_SUCCESS) {
    std::snprintf(text, sizeof(text), "MPI error %d", code);
  }
  std::snprintf(out, static_cast<size_t>(bytes), "%s", text);
}

int start(int* rank, int* size, int* largest_tag) {
  int started = 0;
  if (const int code = MPI_Initialized(&started)) return code;
  int level = MPI_THREAD_FUNNELED;
  if (started) {
    if (const int code = MPI_Query_thread(&level)) return code;
  } else {
    if (const int code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level)) {
      return code;
    }
    g_started_here = true;
  }
  if (level < MPI_THREAD_FUNNELED) return kThreadLevel;
  if (const int code = MPI_Comm_dup(MPI_COMM_WORLD, &g_comm)) return code;
  if (const int code = MPI_Comm_set_errhandler(g_comm, MPI_ERRORS_RETURN)) return code;
  if (const int code = MPI_Comm_rank(g_comm, rank)) return code;
  if (const int code = MPI_Comm_size(g_comm, size)) return code;
  int* bound = nullptr;
  int found = 0;
  if (const int code = MPI_Comm_get_attr(g_comm, MPI_TAG_UB, &bound, &found)) return code;
  constexpr int kLeastBound = 32767;
  *largest_tag = found ? *bound : kLeastBound;
  return MPI_SUCCESS;
}

int finish() {
  if (const int code = MPI_Comm_free(&g_comm)) return code;
  return g_started_here ? MPI_Finalize() : MPI_SUCCESS;
}

int send(const void* data, int bytes, int peer, int tag, Request* request) {
  MPI_Request handle = MPI_REQUEST_NULL;
  const int code = MPI_Isend(data, bytes, MPI_BYTE, peer, tag, g_comm, &handle);
  store(request, handle);
  return code;
}

int receive(void* data, int bytes, int peer, int tag, Request* request) {
  MPI_Request handle = MPI_REQUEST_NULL;
  const int code = MPI_Irecv(data, bytes, MPI_BYTE, peer, tag, g_comm, &handle);
  store(request, handle);
  return code;
}

int test(Request* request, int* done) {
  MPI_Request handle = load(request);
  const int code = MPI_Test(&handle, done, MPI_STATUS_IGNORE);
  store(request, handle);
  return code;
}

int cancel(Request* request) {
  MPI_Request handle = load(request);
  return MPI_Cancel(&handle);
}

int probe(int tag, int* found, int* peer, int* bytes) {
  MPI_Status status;
  if (const int code = MPI_Iprobe(MPI_ANY_SOURCE, tag, g_comm, found, &status)) return code;
  if (!*found) return MPI_SUCCESS;
  *peer = status.MPI_SOURCE;
  return MPI_Get_count(&status, MPI_BYTE, bytes);
}

constexpr Functions kFunctions = {.version = kFunctionsVersion,
                                  .name = "MPI",
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
}  // namespace moiety::comm::mpi

extern "C" const moiety::comm::mpi::Functions* moiety_mpi_functions() {
  return &moiety::comm::mpi::kFunctions;
}
