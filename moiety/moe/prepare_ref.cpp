#include "moiety/moe/prepare_ref.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "moiety/base/integer.h"

namespace moiety::moe::ref {
namespace {

// Takes blocks away one by one, each from the longest expert; among equals from the last one.
std::vector<int64_t> trim(const std::vector<int64_t>& count, int64_t capacity, int64_t a) {
  std::vector<int64_t> blocks;
  for (const int64_t c : count) blocks.push_back(ceil_div(c, a));
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

// The cut of the rows of rank s for every other rank: those from the P-th on are cut, and their
// pairs become masked. It has their number, and the number of rows that there were.
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

// A valid pair; in sorted order the pairs of an expert stand together, as their slots do.
using Pair = std::tuple<int, int, int64_t, int>;  // e, s, t, k

std::vector<Pair> valid_pairs(const PlanInput& in, const Cut& left, Plan& out) {
  const int ranks = in.map.ranks(), experts = in.map.experts();
  std::vector<Pair> pairs;
  for (int s = 0; s < ranks; ++s) {
    Plan::Rank& home = out.rank[s];
    home.slot_TK.assign(in.idx[s].size(), -1);
    home.owner_TK = home.slot_TK;
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
    }
  }
  std::sort(pairs.begin(), pairs.end());
  return pairs;
}

// The rows that an expert keeps, and its first slot.
struct ExpertRoom {
  int64_t kept = 0, offset = 0;
};

std::vector<ExpertRoom> make_room(const PlanInput& in, const std::vector<Pair>& pairs,
                                  const std::vector<int64_t>& rows, Plan& out) {
  std::vector<int64_t> count(in.map.experts());
  for (const Pair& pair : pairs) ++count[std::get<0>(pair)];
  std::vector<ExpertRoom> room(in.map.experts());
  for (int r = 0; r < in.map.ranks(); ++r) {
    Plan::Rank& rank = out.rank[r];
    std::vector<int64_t> local;
    for (const int e : in.map.experts_of(r)) local.push_back(count[e]);
    rank.before = local;
    rank.real = trim(local, in.capacity[r], in.alignment);
    rank.offset = {0};
    for (size_t i = 0; i < local.size(); ++i) {
      room[in.map.experts_of(r)[i]] = {rank.real[i], rank.offset.back()};
      rank.padded.push_back(round_up(rank.real[i], in.alignment));
      rank.offset.push_back(rank.offset.back() + rank.padded.back());
      rank.info[kInfoKept] += rank.real[i];
      rank.info[kInfoRequired] += round_up(local[i], in.alignment);
      rank.info[kInfoDropped] += local[i] - rank.real[i];
    }
    rank.info[kInfoPadded] = rank.offset.back();
    rank.info[kInfoCapacity] = in.capacity[r];
    if (!rows.empty()) rank.slot_row.assign(rows[r], {-1, 0});
  }
  return room;
}

void give_slots(const PlanInput& in, const std::vector<Pair>& pairs,
                const std::vector<ExpertRoom>& room, Plan& out) {
  for (size_t i = 0, begin = 0; i < pairs.size(); ++i) {
    const auto [e, s, t, k] = pairs[i];
    if (std::get<0>(pairs[begin]) != e) begin = i;
    const auto position = static_cast<int64_t>(i - begin);
    if (position < room[e].kept) {
      out.rank[s].slot_TK[t * in.topk + k] = static_cast<int32_t>(room[e].offset + position);
      out.rank[s].owner_TK[t * in.topk + k] = in.map.owner(e);
    } else {
      ++out.rank[s].info[kInfoOwnDropped];
    }
  }
}

// The rows that s sends to r: its tokens with a valid pair there, dead ones too.
void list_rows(const PlanInput& in, const Cut& left, int s, int r, bool with_slots, Plan& out) {
  Plan::Rank& to = out.rank[r];
  for (int64_t t = 0; t < in.tokens(s); ++t) {
    bool valid = false, alive = false;
    std::vector<int32_t> slot_K(in.topk, -1);
    for (int k = 0; k < in.topk; ++k) {
      const int64_t e = left.idx[s][t * in.topk + k];
      if (e < 0 || e >= in.map.experts() || in.map.owner(static_cast<int>(e)) != r) continue;
      valid = true;
      slot_K[k] = out.slots(s, t)[k];
      alive = alive || slot_K[k] >= 0;
    }
    if (!valid) continue;
    const auto j = static_cast<int64_t>(to.token[s].size());
    to.token[s].push_back(static_cast<int32_t>(t));
    to.slot_K[s].insert(to.slot_K[s].end(), slot_K.begin(), slot_K.end());
    if (alive) out.rank[s].row_TR[t * in.map.ranks() + r] = static_cast<int32_t>(j);
    for (const int32_t slot : slot_K) {
      if (slot >= 0 && with_slots) to.slot_row[slot] = {s, j};
    }
  }
}

void tell_group(const PlanInput& in, const Cut& left, Plan& out) {
  int64_t required = 0, tokens = 0;
  int64_t dropped = std::accumulate(left.pairs.begin(), left.pairs.end(), int64_t{0});
  for (int r = 0; r < in.map.ranks(); ++r) {
    required = std::max(required, out.rank[r].info[kInfoRequired]);
    dropped += out.rank[r].info[kInfoDropped];
    tokens += in.tokens(r);
  }
  for (Plan::Rank& rank : out.rank) {
    rank.info[kInfoGroupTokens] = tokens;
    rank.info[kInfoGroupRequired] = required;
    rank.info[kInfoGroupDropped] = dropped;
    rank.info[kInfoGroupOverflow] = dropped > 0;
    rank.info[kInfoLargestRows] = left.largest;
  }
}

}  // namespace

Plan make_plan(const PlanInput& in, const std::vector<int64_t>& rows) {
  Plan out{in, std::vector<Plan::Rank>(in.map.ranks())};
  const Cut left = cut(in);
  const std::vector<Pair> pairs = valid_pairs(in, left, out);
  give_slots(in, pairs, make_room(in, pairs, rows, out), out);
  for (int s = 0; s < in.map.ranks(); ++s) {
    for (int r = 0; r < in.map.ranks(); ++r) list_rows(in, left, s, r, !rows.empty(), out);
  }
  tell_group(in, left, out);
  return out;
}

}  // namespace moiety::moe::ref
