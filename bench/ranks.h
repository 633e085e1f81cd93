// Parts that benchmarks of several ranks share.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "bench/harness.h"
#include "moiety/base/buffer.h"
#include "moiety/base/parallel.h"
#include "moiety/comm/communicator.h"

namespace moiety::bench {

// The milliseconds of each repetition, the slowest rank's. Collective; at most 8192 of them.
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

// "1 1530 MHz 690 W; ..." of the visible GPUs, as nvidia-smi says.
inline std::string clocks_and_power() {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  const std::string command =
      text("nvidia-smi --query-gpu=index,clocks.sm,power.draw --format=csv,noheader{} 2>/dev/null",
           visible ? text(" -i {}", visible) : "");
  std::string out;
  if (FILE* pipe = popen(command.c_str(), "r")) {
    for (char line[256]; std::fgets(line, sizeof(line), pipe);) {
      std::string one = line;
      std::erase(one, ',');
      while (!one.empty() && one.back() == '\n') one.pop_back();
      out += (out.empty() ? "" : "; ") + one;
    }
    pclose(pipe);
  }
  return out;
}

// The copies that others are compared with: by the threads of the calling rank, over memory past
// the caches.
class Copies {
 public:
  Copies() : from_(kRoom), to_(kRoom) {}

  // Reads and writes `bytes` bytes each, in pieces of `grain`.
  void run(int64_t bytes, int64_t grain = int64_t{1} << 20) {
    for (int64_t left = bytes; left > 0;) {
      const int64_t n = std::min(left, kRoom - at_);
      parallel_for(n, grain, [&](int64_t begin, int64_t end) {
        std::memcpy(to_.data() + at_ + begin, from_.data() + at_ + begin,
                    static_cast<size_t>(end - begin));
      });
      at_ = (at_ + n) % kRoom;
      left -= n;
    }
  }

 private:
  static constexpr int64_t kRoom = 2 * kRotatedBytes;
  Buffer from_, to_;
  int64_t at_ = 0;
};

}  // namespace moiety::bench
