// The MPI functions that Moiety uses, as a table that the module libmoiety_mpi.so gives out. Only
// the module is compiled against mpi.h, so all other code is free of one implementation's types.
// Processes that find each other without MPI have a table over sockets (comm/local), and tests put
// their own in its place.
//
// Every function except `library` and `error_text` is called from one thread only, and returns 0 or
// a code for `error_text`. Messages of one sender with one tag arrive in order.
#pragma once

#include <cstdint>

namespace moiety::comm::mpi {

inline constexpr uint32_t kFunctionsVersion = 2;
// The one function that the module exports; it returns the table.
inline constexpr const char* kFunctionsSymbol = "moiety_mpi_functions";

// Room for the implementation's handle of a message under way.
using Request = uint64_t;

struct Functions {
  uint32_t version;
  // What carries the messages, for errors: "MPI".
  const char* name;
  // The implementation's name, "Open MPI v4.1.4, ..."; can be called before MPI is started.
  const char* (*library)();
  void (*error_text)(int code, char* out, int bytes);

  // Starts MPI for a program whose other threads do not call it. MPI may have been started before.
  int (*start)(int* rank, int* size, int* largest_tag);
  // Waits for all processes; shuts MPI down if `start` started it.
  int (*finish)();

  int (*send)(const void* data, int bytes, int peer, int tag, Request* request);
  int (*receive)(void* data, int bytes, int peer, int tag, Request* request);
  // Carries all messages on and tells whether this one is complete or was cancelled; its request is
  // then gone.
  int (*test)(Request* request, int* done);
  // Asks to give up a receive; `test` tells when that is done.
  int (*cancel)(Request* request);
  // Tells whether a message with this tag waits to be received, its sender and its length.
  int (*probe)(int tag, int* found, int* peer, int* bytes);
};

}  // namespace moiety::comm::mpi
