// Finds and opens libmoiety_mpi.so. The places are, in this order: beside the program, ../lib of it
// (or the installation's folder of libraries), beside the library that this code is part of, the
// system's places.
#pragma once

#include <string>

#include "moiety/comm/mpi/functions.h"

namespace moiety::comm::mpi {

struct Module {
  const Functions* functions = nullptr;  // null if it cannot be used
  std::string text;                      // what was found and where, or what is missing
};

// Opens the module at the first call, for good.
const Module& load();

}  // namespace moiety::comm::mpi
