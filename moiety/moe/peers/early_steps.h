// prepare and dispatch in one, among GPU ranks that have few tokens: rows are pushed before the
// counts of peers are known (docs/spec/ep.md#early-rows). Epoch n is that of prepare, n + 1 that of
// dispatch.
#pragma once

#include "moiety/moe/peers/copy_steps.h"
#include "moiety/moe/peers/prepare_steps.h"

namespace moiety::moe::peers {

// Takes the next two epochs; returns when all peers have read what this rank's stores in both will
// overwrite.
struct EnterEarly {
  static constexpr int kThreads = 64;
  Control* control;
  uint32_t prepare, dispatch;  // signatures
  int64_t row_bytes;
  Epoch plan;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    Control& c = *control;
    const bool entered = enter_epochs(team, c, 1, [&] {
      c.pulls = 0;
      c.entry = {uint64_t(c.epoch) << kSignatureBits | prepare, 0, 0};
      c.next = {uint64_t(c.epoch + 1) << kSignatureBits | dispatch, row_bytes, plan};
    });
    if (!entered) return;
    team.each(2 * (c.ranks - 1), [&](int64_t i) {
      const bool next = i >= c.ranks - 1;
      post_entry(c, c.peer(i % (c.ranks - 1)), next ? c.next_half() : c.half(),
                 next ? c.next : c.entry, {});
    });
    team.each(c.ranks, [&](int64_t r) { c.direct_R[r] = {}; });
  }
};

// The first block numbers rows and pairs and sends prepare's messages; the others push all rows,
// also those that turn out dead.
template <bool many>
struct PushEarly {
  static constexpr int kThreads = NumberPairs<many>::kThreads;
  Control* control;
  PrepareView p;
  CopyRows rows;

  // The memory of a team: the ranks of tokens, then, of one that pushes, the tokens of a chunk.
  static constexpr int64_t kTokens = 8 * kTokenBlock, kNumber = kTokens + 4 * kTokenBlock;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    Control& c = *control;
    if (failed(team, c)) return;
    if (team.block() == 0) {
      Team part = team.part(0, 1);
      NumberPairs<many>{control, p, true}(part);
      team.sync();
      ExchangeHeads{control, p, true, false}(part);
      return;
    }
    find_pairs(team, c, p, 0, [](int64_t, int64_t) {});
    const int64_t most = p.plan.tokens < p.plan.rows_max ? p.plan.tokens : p.plan.rows_max;
    const int64_t tasks = c.chunks(most) * (c.ranks - 1);
    for (int64_t i = team.block() - 1; i < tasks; i += team.blocks() - 1) {
      push(team, c, chunk_task(i, c.rank, c.ranks));
    }
  }

 private:
  template <class Team>
  MOIETY_STEP void push(Team& team, const Control& c, const ChunkTask& task) const {
    const int r = task.peer;
    const int64_t begin = task.chunk * c.chunk_rows;
    const int64_t end =
        begin + c.chunk_rows < p.plan.rows_max ? begin + c.chunk_rows : p.plan.rows_max;
    const auto* ranks = team.template shared<Ranks>(0);
    auto* token_of = team.template shared<int32_t>(kTokens);
    auto* count = team.template shared<int64_t>(kNumber);  // of the chunk's rows
    team.sync();
    team.each_warp(1, [&](auto& warp, int64_t) {
      const int64_t n = warp.number(
          p.plan.tokens, [&](int64_t t) { return (ranks[t] >> r & 1) != 0; },
          [&](int64_t t, int64_t row) {
            if (row >= begin && row < end) token_of[row - begin] = static_cast<int32_t>(t);
          });
      warp.one([&] { *count = (n < end ? n : end) - begin; });
    });
    team.sync();
    if (*count <= 0) return;
    const int64_t pieces = rows.pieces();
    team.each_warp(*count * pieces, [&](auto& warp, int64_t i) {
      const Split split(i, pieces);
      std::byte* const record =
          c.record_in(c.next_half(), r, c.rank, begin + split.item, rows.staged.record);
      store_piece(warp, p.plan, rows, rows.part[0], token_of[split.item], split.rest,
                  {record, record, &rows.staged});
    });
    team.sync();
    team.one(
        [&] { store_release(c.ready_word_in(c.next_half(), r, c.rank, task.chunk), c.next.word); });
  }
};

// Waits for the heads of all ranks and ends prepare, with the slots; then waits for all rows. One
// block.
struct SettleEarly {
  static constexpr int kThreads = SettlePlan::kThreads;
  Control* control;
  PrepareView p;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    Control& c = *control;
    SettlePlan{{control, p, false, true}}(team);
    team.sync();
    FindSlots{control, p}(team);
    team.sync();
    if (failed(team, c)) return;
    give_credits(team, c);
    team.sync();
    team.one([&] {
      ++c.epoch;
      c.entry = c.next;
    });
    team.sync();
    Await{control, p.plan, false}(team);
  }
};

}  // namespace moiety::moe::peers
