#include "moiety/moe/findings.h"

#include <algorithm>

#include "moiety/base/error.h"

namespace moiety::moe {

std::string Finding::text(const std::string& group, int experts) const {
  const std::string where = moiety::text("ep prepare, group \"{}\": rank {}", group, rank);
  switch (kind) {
    case Kind::kBadIndex:
      return where + moiety::text(", token {}, choice {}: expert {} is outside [0, {})", value[0],
                                  value[1], value[2], experts);
    case Kind::kPeerRows:
      return where + moiety::text(" has {} rows for rank {}, peer_rows is {}", value[0], value[1],
                                  value[2]);
    case Kind::kCapacity:
      return where + moiety::text(" needs {} rows, capacity {}; largest is expert {} with {}",
                                  value[0], value[1], value[2], value[3]);
  }
  return where;
}

std::optional<Finding> Findings::take(Epoch epoch) {
  const auto asked = [&](const Finding& f) { return f.epoch <= epoch; };
  Finding* const end = finding + count;
  const Finding* first = std::find_if(finding, end, asked);
  if (first == end) return std::nullopt;
  const Finding out = *first;
  count = std::remove_if(finding, end, asked) - finding;
  return out;
}

}  // namespace moiety::moe
