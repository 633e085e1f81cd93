#include "moiety/moe/prepare_ref.h"

#include <algorithm>
#include <numeric>
#include <tuple>

namespace moiety::moe::ref {
namespace {

// Takes blocks away one by one, each from the longest expert, of equals from the last.
std::vector<int64_t> trim(const std::vector<int64_t>& count, int64_t capacity, int64_t a) {
  std::vector<int64_t> blocks;
  for (const int64_t c : count) blocks.push_back((c + a - 1) / a);
  for (auto used = std::accumulate(blocks.begin(), blocks.end(), int64_t{0}); used > capacity / a;
       --used) {
    size_t longest = 0;
    for (size_t e = 0; e < blocks.size(); ++e) {
      if (blocks[e] >= blocks[longest]) longest = e;
    }
    --blocks[longest];
  }
  std::vector<int64_t> kept;
  for (size_t e = 0; e < count.size(); ++e) kept.push_back(std::min(count[e], blocks[e] * a));
  return kept;
}

// Of the rows of rank s for every other rank, those from the P-th on are cut: their pairs become
// masked. Counts them, and the rows that there were.
struct Cut {
  PerRank<int64_t> idx;
  std::vector<int64_t> pairs;  // by rank
  int64_t largest = 0;
};

Cut cut(const PlanInput& in) {
  Cut out{in.idx, std::vector<int64_t>(in.idx.size())};
  for (int s = 0; s < in.map.ranks(); ++s) {
    for (int r = 0; r < in.map.ranks(); ++r) {
      int64_t rows = 0;
      for (int64_t t = 0; t < in.tokens(s) && r != s; ++t) {
        std::vector<int64_t> pairs;
        for (int64_t i = t * in.topk; i < (t + 1) * in.topk; ++i) {
          const int64_t e = in.idx[s][i];
          const bool valid = e >= 0 && e < in.map.experts();
          if (valid && in.map.owner(static_cast<int>(e)) == r) pairs.push_back(i);
        }
        if (pairs.empty() || ++rows <= in.peer_rows || in.peer_rows == 0) continue;
        for (const int64_t i : pairs) out.idx[s][i] = -1;
        out.pairs[s] += static_cast<int64_t>(pairs.size());
      }
      out.largest = std::max(out.largest, rows);
    }
  }
  return out;
}

}  // namespace

Plan make_plan(const PlanInput& in, const std::vector<int64_t>& rows) {
  const int ranks = in.map.ranks(), experts = in.map.experts();
  const int64_t a = in.alignment;
  Plan out{in, std::vector<Plan::Rank>(ranks)};
  const Cut left = cut(in);

  // All valid pairs, sorted by (e, s, t, k): the position in the run of an expert is the pair's.
  std::vector<std::tuple<int, int, int64_t, int>> pairs;
  std::vector<int64_t> count(experts);
  for (int s = 0; s < ranks; ++s) {
    Plan::Rank& home = out.rank[s];
    home.slot_TK.assign(in.idx[s].size(), -1);
    home.row_TR.assign(in.tokens(s) * ranks, -1);
    home.token.resize(ranks);
    home.slot_K.resize(ranks);
    home.info[kInfoOwnDropped] = left.pairs[s];
    for (int64_t i = 0; i < static_cast<int64_t>(in.idx[s].size()); ++i) {
      const int64_t e = in.idx[s][i];
      home.info[kInfoOwnMasked] += e < 0;
      home.info[kInfoOwnBad] += e >= experts;
      if (left.idx[s][i] < 0 || e >= experts) continue;
      pairs.emplace_back(static_cast<int>(e), s, i / in.topk, static_cast<int>(i % in.topk));
      ++count[e];
    }
  }
  std::sort(pairs.begin(), pairs.end());

  std::vector<int64_t> kept(experts), offset(experts);
  int64_t required_most = 0, tokens_all = 0;
  int64_t dropped_all = std::accumulate(left.pairs.begin(), left.pairs.end(), int64_t{0});
  for (int r = 0; r < ranks; ++r) {
    Plan::Rank& rank = out.rank[r];
    std::vector<int64_t> local;
    for (const int e : in.map.experts_of(r)) local.push_back(count[e]);
    rank.before = local;
    rank.real = trim(local, in.capacity[r], a);
    rank.offset = {0};
    for (size_t i = 0; i < local.size(); ++i) {
      kept[in.map.experts_of(r)[i]] = rank.real[i];
      offset[in.map.experts_of(r)[i]] = rank.offset.back();
      rank.padded.push_back((rank.real[i] + a - 1) / a * a);
      rank.offset.push_back(rank.offset.back() + rank.padded.back());
      rank.info[kInfoKept] += rank.real[i];
      rank.info[kInfoRequired] += (local[i] + a - 1) / a * a;
      rank.info[kInfoDropped] += local[i] - rank.real[i];
    }
    rank.info[kInfoPadded] = rank.offset.back();
    rank.info[kInfoCapacity] = in.capacity[r];
    if (!rows.empty()) rank.slot_row.assign(rows[r], {-1, 0});
    required_most = std::max(required_most, rank.info[kInfoRequired]);
    dropped_all += rank.info[kInfoDropped];
    tokens_all += in.tokens(r);
  }

  for (size_t i = 0, begin = 0; i < pairs.size(); ++i) {
    const auto [e, s, t, k] = pairs[i];
    if (std::get<0>(pairs[begin]) != e) begin = i;
    const int64_t position = static_cast<int64_t>(i - begin);
    if (position < kept[e]) {
      out.rank[s].slot_TK[t * in.topk + k] = static_cast<int32_t>(offset[e] + position);
    } else {
      ++out.rank[s].info[kInfoOwnDropped];
    }
  }

  // Rows: tokens of s with a valid pair at r, dead ones too.
  for (int s = 0; s < ranks; ++s) {
    for (int r = 0; r < ranks; ++r) {
      Plan::Rank& to = out.rank[r];
      for (int64_t t = 0; t < in.tokens(s); ++t) {
        bool valid = false, alive = false;
        std::vector<int32_t> slot_K(in.topk, -1);
        for (int k = 0; k < in.topk; ++k) {
          const int64_t e = left.idx[s][t * in.topk + k];
          if (e < 0 || e >= experts || in.map.owner(static_cast<int>(e)) != r) continue;
          valid = true;
          slot_K[k] = out.slots(s, t)[k];
          alive = alive || slot_K[k] >= 0;
        }
        if (!valid) continue;
        const auto j = static_cast<int64_t>(to.token[s].size());
        to.token[s].push_back(static_cast<int32_t>(t));
        to.slot_K[s].insert(to.slot_K[s].end(), slot_K.begin(), slot_K.end());
        if (alive) out.rank[s].row_TR[t * ranks + r] = static_cast<int32_t>(j);
        for (const int32_t slot : slot_K) {
          if (slot >= 0 && !rows.empty()) to.slot_row[slot] = {s, j};
        }
      }
    }
  }
  for (Plan::Rank& rank : out.rank) {
    rank.info[kInfoGroupTokens] = tokens_all;
    rank.info[kInfoGroupRequired] = required_most;
    rank.info[kInfoGroupDropped] = dropped_all;
    rank.info[kInfoGroupOverflow] = dropped_all > 0;
    rank.info[kInfoLargestRows] = left.largest;
  }
  return out;
}

}  // namespace moiety::moe::ref
