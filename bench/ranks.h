// What benchmarks of several ranks share.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "moiety/comm/communicator.h"

namespace moiety::bench {

// Milliseconds of each repetition, the slowest rank's. Collective; at most 8192 of them.
inline std::vector<double> slowest(comm::Communicator& comm, const std::vector<double>& mine) {
  std::vector<double> out(mine.size());
  for (const std::string& bytes :
       comm.bootstrap().all_gather({reinterpret_cast<const char*>(mine.data()), 8 * mine.size()})) {
    for (size_t i = 0; i < out.size(); ++i) {
      double ms = 0;
      std::memcpy(&ms, bytes.data() + 8 * i, 8);
      out[i] = std::max(out[i], ms);
    }
  }
  return out;
}

}  // namespace moiety::bench
