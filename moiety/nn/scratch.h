// A small piece of memory of the calling thread, for the fast CPU paths. There is one piece per
// thread: an operation takes it once per task and calls no other operation while it uses it.
#pragma once

#include "moiety/base/buffer.h"

namespace moiety::nn {

// At least n elements, aligned to 64 bytes, with unspecified contents.
template <class T>
T* thread_scratch(int64_t n) {
  thread_local Buffer memory;
  const int64_t bytes = n * static_cast<int64_t>(sizeof(T));
  if (memory.bytes() < bytes) memory = Buffer(bytes, "thread scratch");
  return reinterpret_cast<T*>(memory.data());
}

}  // namespace moiety::nn
