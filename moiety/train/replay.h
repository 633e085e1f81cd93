// What the replay of a halted step says: the first tensor that was not finite, or that the fault
// did not come again, which accuses the hardware.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace moiety::train {

// One rank's part. The checksums are those of its losses and of its gradients before they are
// summed over the ranks, after the step and after its replay.
struct RankReplay {
  int64_t order = -1;     // of the first tensor with a value that is not finite; -1: there was none
  std::string finding{};  // a sentence about it
  std::string before{};   // one that the step itself had found (guard.nan = tensor), or empty
  uint32_t first = 0, again = 0;
};
std::string to_json(const RankReplay& part);
RankReplay parse_rank_replay(std::string_view json);

// The verdict of all ranks, by rank. `bad_parameter`: whose summed gradient is not finite in the
// replay, or empty.
std::string replay_verdict(std::span<const RankReplay> ranks, const std::string& bad_parameter);

}  // namespace moiety::train
