// Errors in their callers' data that prepares found, for EpGroup::check and take_report. They are
// plain memory, which lies where the group runs and is changed in stream order.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "moiety/base/host_device.h"
#include "moiety/moe/ep_group.h"

namespace moiety::moe {

// An error of the caller's data, equal on all ranks.
struct Finding {
  enum class Kind : int32_t { kBadIndex, kPeerRows, kCapacity };
  Epoch epoch = 0;
  Kind kind = Kind::kBadIndex;
  int32_t rank = 0;
  // For kBadIndex: token, choice, index. For kPeerRows: rows, the rank that they are for,
  // peer_rows. For kCapacity: required, capacity, largest expert, its pairs.
  int64_t value[4] = {};

  // The finding as text: "ep prepare, group "moe": rank 1, token 77, choice 3: expert 256 is
  // outside [0, 256)".
  std::string text(const std::string& group, int experts) const;
};

struct Findings {
  static constexpr int kMost = 64;  // a caller that never asks must not fill the memory
  int64_t count = 0;
  Finding finding[kMost];
  int64_t report[3] = {};  // as take_report writes it

  MOIETY_HD void add(const Finding& f) {
    if (count < kMost) finding[count++] = f;
  }
  // Adds an overflow under kReport.
  MOIETY_HD void add_overflow(int64_t required, int64_t dropped) {
    ++report[0];
    report[1] = report[1] > required ? report[1] : required;
    report[2] += dropped;
  }
  // The first finding at or before `epoch`; forgets all of those.
  std::optional<Finding> take(Epoch epoch);
};

}  // namespace moiety::moe
