#include "moiety/comm/bootstrap.h"

#include "moiety/base/error.h"

namespace moiety::comm {

void check_all_gather(std::string_view bytes) {
  MOIETY_CHECK(bytes.size() <= 64 << 10, "bootstrap all_gather: {} bytes, at most 65536",
               bytes.size());
}

std::string rank_list(const std::vector<int>& ranks) {
  std::string out;
  for (size_t i = 0; i < ranks.size(); ++i) {
    out += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  }
  return (ranks.size() == 1 ? "rank " : "ranks ") + out;
}

}  // namespace moiety::comm
