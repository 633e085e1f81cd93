// What is exchanged in ep_ranks_cuda.h: shapes, and which experts tokens choose.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "moiety/base/buffer.h"
#include "moiety/base/error.h"
#include "moiety/moe/expert_map.h"

namespace moiety::bench {

// Which experts tokens choose: all alike; the first one 8 times as often as another; those of the
// first rank 4 times as often; or all alike, but ranks have fewer tokens the later they come.
enum class RanksRouting { kUniform, kHotExpert, kHotRank, kUneven };

struct RanksShape {
  int64_t tokens, model;
  int topk, experts;
  int64_t alignment = 16;
  RanksRouting routing = RanksRouting::kUniform;
};
inline constexpr RanksShape kRanksShapes[] = {
    {4096, 7168, 8, 64},
    {4096, 2048, 8, 128},
    {8192, 2048, 8, 128},
    {128, 7168, 8, 256},
    {128, 7168, 8, 256, 1},
    {4096, 7168, 8, 64, 16, RanksRouting::kHotExpert},
    {4096, 7168, 8, 64, 16, RanksRouting::kHotRank},
    {4096, 7168, 8, 64, 16, RanksRouting::kUneven},
};

inline std::string describe(const RanksShape& s) {
  constexpr const char* kRoutings[] = {"", ", hot expert x8", ", hot rank x4", ", uneven T"};
  return text("T{} D{} K{} E{}{}{}", s.tokens, s.model, s.topk, s.experts,
              s.alignment == 16 ? "" : text(" a{}", s.alignment),
              kRoutings[static_cast<int>(s.routing)]);
}
inline int64_t tokens_of(const RanksShape& s, int rank, int ranks) {
  return s.routing == RanksRouting::kUneven ? s.tokens * (ranks - rank) / ranks : s.tokens;
}
// How often an expert is chosen, beside others.
inline double heat_of(const RanksShape& s, const moe::ExpertMap& map, int expert) {
  if (s.routing == RanksRouting::kHotExpert && expert == 0) return 8;
  return s.routing == RanksRouting::kHotRank && map.owner(expert) == 0 ? 4 : 1;
}
// Every token takes K distinct experts at random: those that are first to be drawn.
template <class Random>
void choose_experts(const RanksShape& s, const moe::ExpertMap& map, const Tensor& idx_TK,
                    Random&& random_word) {
  std::vector<std::pair<double, int32_t>> experts(static_cast<size_t>(s.experts));
  for (int64_t t = 0; t < idx_TK.view().size(0); ++t) {
    for (int e = 0; e < s.experts; ++e) {
      const double u = (random_word(t * s.experts + e) + 0.5) / 4294967296.0;
      experts[e] = {-std::log(u) / heat_of(s, map, e), e};
    }
    std::partial_sort(experts.begin(), experts.begin() + s.topk, experts.end());
    for (int k = 0; k < s.topk; ++k) idx_TK.data<int32_t>()[t * s.topk + k] = experts[k].second;
  }
}

}  // namespace moiety::bench
