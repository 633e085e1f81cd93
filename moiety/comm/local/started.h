// What a process that start_ranks started knows of its place: an environment variable, read once.
#pragma once

#include <string>
#include <vector>

namespace moiety::comm::local {

// "RANK/RANKS:REPORT:SOCKET,SOCKET,...": descriptors, the sockets by rank, -1 for its own.
inline constexpr const char* kVariable = "MOIETY_STARTED_RANK";

struct Started {
  int rank = 0;
  int report = -1;           // where the parent reads why this rank fails
  std::vector<int> sockets;  // by rank
};

std::string to_text(const Started& started);
// Throws Error(kUsage) if this is no such text.
Started from_text(const std::string& text);

// The place of this process; null if start_ranks has not started it. The variable is gone afterwards,
// and processes that this one starts do not get the descriptors.
const Started* started();

}  // namespace moiety::comm::local
