// Finds and opens libmoiety_mpi.so: beside the program, in ../lib of it (or what the installation
// calls its folder of libraries), beside the library that this code is part of, then where the
// system looks.
#pragma once

#include <string>

#include "moiety/comm/mpi/functions.h"

namespace moiety::comm::mpi {

struct Module {
  const Functions* functions = nullptr;  // null if it cannot be used
  std::string text;                      // what was found and where, or what is missing
};

// Opened at the first call, for good.
const Module& load();

}  // namespace moiety::comm::mpi
