// How functions of the C API end: with a code, and a text of the calling thread. Internal to
// moiety/capi.
#pragma once

#include <exception>
#include <new>
#include <string>

#include "moiety/base/error.h"
#include "moiety/capi/moiety.h"

namespace moiety::capi {

// The calling thread's last error.
std::string& last_error();

// Runs f; no exception leaves it.
template <class F>
int guarded(F&& f) noexcept {
  int code = MOIETY_INTERNAL;
  try {
    try {
      f();
      return MOIETY_OK;
    } catch (const Error& e) {
      code = static_cast<int>(e.kind()) + 1;
      last_error() = e.what();
    } catch (const std::bad_alloc&) {
      code = MOIETY_OUT_OF_MEMORY;
      last_error() = "memory is short";
    } catch (const std::exception& e) {
      last_error() = e.what();
    } catch (...) {
      last_error() = "an exception without a text";
    }
  } catch (...) {  // not even the text of the error had room
    last_error().clear();
  }
  return code;
}

// Gives the caller a text of his own.
void give(char** out, const std::string& text);

}  // namespace moiety::capi
