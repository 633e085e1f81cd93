// What a test says of an error.
#pragma once

#include <optional>
#include <string>

#include <gtest/gtest.h>

#include "moiety/base/error.h"

namespace moiety {

// The text of the Error that f throws, which is of this kind if one is given; "no error" if it
// throws none.
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
  return "no error";
}

}  // namespace moiety
