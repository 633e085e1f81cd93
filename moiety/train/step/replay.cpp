#include "moiety/train/step/replay.h"

#include <nlohmann/json.hpp>

#include "moiety/base/format.h"
#include "moiety/base/json_line.h"

namespace moiety::train {

std::string to_json(const RankReplay& part) {
  return JsonLine()
      .add("order", part.order)
      .add("finding", part.finding)
      .add("before", part.before)
      .add("first", part.first)
      .add("again", part.again)
      .text();
}

RankReplay parse_rank_replay(std::string_view text) {
  const nlohmann::json json = nlohmann::json::parse(text);
  return {.order = json.at("order").get<int64_t>(),
          .finding = json.at("finding").get<std::string>(),
          .before = json.at("before").get<std::string>(),
          .first = json.at("first").get<uint32_t>(),
          .again = json.at("again").get<uint32_t>()};
}

std::string replay_verdict(std::span<const RankReplay> ranks, const std::string& bad_parameter) {
  int first = -1;
  for (int r = 0; r < static_cast<int>(ranks.size()); ++r) {
    if (ranks[r].order < 0) continue;
    if (first < 0 || ranks[r].order < ranks[first].order) first = r;
  }
  if (first >= 0) return text("rank {}: {}", first, ranks[first].finding);
  if (!bad_parameter.empty()) {
    return text("the gradient of {} is finite on every rank and overflows in their sum",
                bad_parameter);
  }
  std::string sums, before;
  bool same = true;
  for (int r = 0; r < static_cast<int>(ranks.size()); ++r) {
    sums += text("{}rank {} {:08x} {:08x}", r == 0 ? "" : ", ", r, ranks[r].first, ranks[r].again);
    same = same && ranks[r].first == ranks[r].again;
    if (before.empty() && !ranks[r].before.empty()) {
      before = text("; the step had rank {}: {}", r, ranks[r].before);
    }
  }
  if (same && before.empty()) return "the replay gives the same bits, all of them finite";
  return text("not reproduced: suspect hardware; checksums of the step and of its replay: {}{}",
              sums, before);
}

}  // namespace moiety::train
