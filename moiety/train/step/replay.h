// The verdict on a halted step from its replay: the first tensor that was not finite, or that the
// fault did not come again, which accuses the hardware.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace moiety::train {

// One rank's part. The checksums cover its losses and its gradients before they are summed over the
// ranks, after the step and after its replay.
struct RankReplay {
  int64_t order = -1;     // of the first tensor with a non-finite value; -1 if there was none
  std::string finding{};  // a sentence about it
  std::string before{};  // a sentence that the step itself had found (guard.nan = tensor), or empty
  uint32_t first = 0, again = 0;
};
std::string to_json(const RankReplay& part);
RankReplay parse_rank_replay(std::string_view json);

// The verdict of all ranks, given by rank. `bad_parameter` is the one whose summed gradient is not
// finite in the replay, or empty.
std::string replay_verdict(std::span<const RankReplay> ranks, const std::string& bad_parameter);

}  // namespace moiety::train
