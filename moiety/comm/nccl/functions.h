// The functions of NCCL that are used, as a table without NCCL's types: nccl_loader.cpp fills it from
// the library that is opened at run time, and tests put their own in its place.
//
// Every function but error_text returns 0 or a code for `error_text`. Messages are bytes: NCCL adds
// nothing up.
#pragma once

#include <array>
#include <cstddef>
#include <string>

namespace moiety::comm::nccl {

// The name of a group that one rank draws and all pass to `join`.
using Id = std::array<char, 128>;

struct Functions {
  bool available = false;
  std::string text;  // version and file, or the reason why it is not available

  const char* (*error_text)(int code) = nullptr;
  int (*make_id)(Id* id) = nullptr;
  // Makes this rank's part of a group; returns when all ranks have come. On the GPU `device`.
  int (*join)(const Id& id, int ranks, int rank, int device, void** group) = nullptr;
  // The same for a part of a group, whose memory it shares; null for a rank with a negative color.
  // All ranks of the parent call it.
  int (*split)(void* parent, int color, int key, int device, void** group) = nullptr;

  // What is called between begin and end happens as one.
  int (*begin)() = nullptr;
  int (*end)() = nullptr;
  int (*send)(const void* data, size_t bytes, int peer, void* group, void* stream) = nullptr;
  int (*receive)(void* data, size_t bytes, int peer, void* group, void* stream) = nullptr;
  int (*all_gather)(const void* send, void* recv, size_t bytes, void* group,
                    void* stream) = nullptr;
  int (*broadcast)(void* data, size_t bytes, int root, void* group, void* stream) = nullptr;

  // The error that an operation under way has met; 0: none.
  int (*async_error)(void* group, int* code) = nullptr;
  // Ends a group whose operations are complete.
  int (*destroy)(void* group) = nullptr;
  // Ends a group whose operations are not, and them with it. May wait for graphs that hold them.
  int (*abort)(void* group) = nullptr;
};

// The table, filled at the first call.
const Functions& functions();

}  // namespace moiety::comm::nccl
