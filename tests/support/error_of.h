// The kind and the text of an error, for tests.
#pragma once

#include <optional>
#include <string>

#include <gtest/gtest.h>

#include "moiety/base/error.h"

namespace moiety {

// The text if no error is thrown.
inline const std::string kNoError = "no error";

// The text of the Error that f throws, which is of this kind if one is given, or kNoError.
template <class F>
std::string error_of(F&& f, std::optional<ErrorKind> kind = {}) {
  try {
    f();
  } catch (const Error& e) {
    if (kind) {
      EXPECT_EQ(e.kind(), *kind) << e.what();
    }
    return e.what();
  }
  return kNoError;
}

// "Kind: text" of the Error that f throws, or kNoError.
template <class F>
std::string kind_and_error_of(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    return std::string(name(e.kind())) + ": " + e.what();
  }
  return kNoError;
}

}  // namespace moiety
