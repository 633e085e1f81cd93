// Which kernels of this program CUDA has loaded, so that a test can tell when it loads one: all that
// nvcc has compiled into the program, and not those of libraries that it opens. One kernel of each
// file counts as loaded always.
#pragma once

#include <cstdint>
#include <set>
#include <string>

namespace moiety::testing {

struct Kernels {
  int64_t all = 0;
  std::set<std::string> loaded;  // names
};
// On this GPU.
Kernels find_kernels(int device);

}  // namespace moiety::testing
