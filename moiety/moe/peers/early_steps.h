// prepare and dispatch in one, among GPU ranks that have few tokens: rows are pushed before the
// counts of peers are known (docs/spec/ep.md#early-rows). Epoch n is that of prepare, n + 1 that of
// dispatch.
#pragma once

#include "moiety/moe/peers/copy_steps.h"
#include "moiety/moe/peers/prepare_steps.h"

namespace moiety::moe::peers {

// All of prepare_dispatch but for the taking of rows. The first block enters both epochs, counts rows
// and pairs, sends heads and counts, settles the plan with those of the peers, and waits for their
// rows and records. The second one numbers rows and pairs and sends the records, then the entry of
// dispatch, by which peers know that they are there. The others push the rows, also those that turn
// out dead, when the first one has entered, and find the slots when it has settled the plan: all of
// them may wait at the same time. The credits for both epochs are given when the rows are taken.
template <bool many>
struct Early {
  static constexpr int kThreads = NumberPairs<many>::kThreads, kPushers = 12,
                       kBlocks = 2 + kPushers;
  static constexpr bool kTogether = true;
  Control* control;
  uint32_t prepare, dispatch;  // signatures
  int64_t row_bytes;
  Epoch plan;
  PrepareView p;
  CopyRows rows;

  // The memory of a team: the ranks of tokens, then, of one that pushes, the tokens of each rank's
  // rows, and how many they are.
  static constexpr int64_t kTokens = 8 * kTokenBlock;
  static constexpr int64_t counts(int64_t ranks) { return kTokens + 2 * kTokenBlock * ranks; }
  static constexpr int64_t shared_bytes(int64_t topk, int64_t experts, int64_t ranks) {
    const int64_t number = NumberPlaces(topk, experts, kThreads / 32).bytes;
    const int64_t push = counts(ranks) + 4 * ranks, more = number > push ? number : push;
    const int64_t trim = trim_bytes(experts), count = shared_counts(experts);
    const int64_t lead = trim > count ? trim : count;
    return more > lead ? more : lead;
  }

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    Control& c = *control;
    if (team.block() > 1) {
      Team pushing = team.part(2, kPushers);
      return push(pushing, c);
    }
    Team alone = team.part(team.block(), 1);
    team.block() == 0 ? lead(alone, c) : number(alone, c);
  }

 private:
  // Enters, and finds the ranks and experts of pairs meanwhile. False if the group has failed.
  template <class Team>
  MOIETY_STEP bool enter(Team& team, Control& c, Errors& errors, int32_t* pairs_E) const {
    bool begun = true;
    team.each(c.experts, [&](int64_t e) { pairs_E[e] = 0; });
    find_pairs(
        team, c, p, 0,
        [&](int64_t i, int64_t e) {
          errors.look(c, p, 0, i, e);
          if (e >= 0 && e < c.experts) add(&pairs_E[e], 1);
        },
        [&] {
          on_last(team, [&] {
            begun = begin_epochs(c, [&] {
              c.pulls = 0;
              c.entry = {uint64_t(c.epoch) << kSignatureBits | prepare, 0, 0};
              c.next = {uint64_t(c.epoch + 1) << kSignatureBits | dispatch, row_bytes, plan};
            });
          });
        });
    if (team.any(!begun) || !await_credits(team, c, 1)) return false;
    // Released, so that what is pushed comes behind the credits that this block has seen.
    team.one([&] { store_release_here(&c.early, c.next.word); });
    team.each(c.ranks, [&](int64_t r) { c.direct_R[r] = {}; });
    return true;
  }

  template <class Team>
  MOIETY_STEP void lead(Team& team, Control& c) const {
    auto* pairs_E = team.template shared<int32_t>(8 * kTokenBlock);
    Errors errors;
    if (!enter(team, c, errors, pairs_E)) return;
    errors.add_up(team, c);
    number_rows(
        team, c, p, 0, [](int64_t, int, int64_t) {},
        [&](int r, int64_t n) { keep_rows(c, p, r, n); });
    if (p.may_cut()) count_kept_pairs(team, c, p, 0, pairs_E);
    team.each(c.experts, [&](int64_t e) { keep_pairs(c, p, e, pairs_E[e]); });
    team.sync();
    const ExchangeHeads heads{control, p};
    heads.send(team, c);
    clear_slots(team, p.plan);
    if (!heads.receive(team, c)) return;
    // What is left of the prepare stands in no word of its epoch.
    team.one([&] {
      c.begin_epoch();
      c.entry = c.next;
    });
    // Peers' records are there when they have told of the second entry.
    bool met = true;
    const int64_t threads = 32 * team.warps();
    TrimExperts{p}(team, c, [&] {
      team.each(threads, [&](int64_t i) {
        const int64_t peer = threads - 1 - i;
        if (peer < c.ranks - 1) met = meet(c, c.peer(peer)) && met;
      });
    });
    if (team.any(!met)) return;
    team.one([&] { store_release_here(&c.settled, c.next.word); });
    on_last(team, [&] { SettlePlan{heads}.write_info(c); });
    const Await rows_here{control, p.plan, false};
    const uint64_t start = nanoseconds();
    rows_here.look_out(team, [](int64_t thread) { return thread; });
    team.sync();
    rows_here.came(team, start);
  }

  template <class Team>
  MOIETY_STEP void number(Team& team, Control& c) const {
    const NumberPairs<many> step{control, p, true, false};
    step.number(team, c, 0);
    if (!come_to(team, c, c.early)) return;
    const uint64_t word = load_acquire(&c.early);
    const Epoch epoch = epoch_of(word);
    step.send(team, c, 0, [&](int r) { return c.message_in(c.half_of(epoch - 1), r, c.rank); });
    team.sync();
    // From here on rows that turn out dead may lose their numbers.
    on_last(team, [&] { store_release_here(&c.numbered, word); });
    team.each(c.ranks - 1, [&](int64_t i) {
      const Entry entry{word, row_bytes, plan};
      store_entry(c, c.peer(i), c.half_of(epoch), entry, {});
      post_head(c, c.peer(i), c.half_of(epoch), entry);
    });
  }

  // Returns when other blocks have stored these words; false if the group has failed.
  template <class Team, class... Words>
  MOIETY_STEP bool come_to(Team& team, const Control& c, const Words&... words) const {
    bool here = true;
    const auto look_for = [&](const uint64_t& word) {
      while (here && load_acquire(&word) == 0) {
        here = look(&c.failed) == 0;
        pause();
      }
    };
    team.one([&] { (look_for(words), ...); });
    return !team.any(!here);
  }
  template <class Team>
  MOIETY_STEP void push(Team& team, const Control& c) const {
    find_pairs(team, c, p, 0, [](int64_t, int64_t) {});
    const auto* ranks = team.template shared<Ranks>(0);
    auto* token_RJ = team.template shared<uint16_t>(kTokens);
    auto* rows_R = team.template shared<int32_t>(counts(c.ranks));
    team.each_warp(c.ranks, [&](auto& warp, int64_t r) {
      const int64_t n = warp.number(
          r == c.rank ? 0 : p.plan.tokens, [&](int64_t t) { return (ranks[t] >> r & 1) != 0; },
          [&](int64_t t, int64_t j) { token_RJ[r * kTokenBlock + j] = static_cast<uint16_t>(t); });
      warp.one(
          [&] { rows_R[r] = static_cast<int32_t>(n < p.plan.rows_max ? n : p.plan.rows_max); });
    });
    if (!come_to(team, c, c.early)) return;
    const uint64_t word = load_acquire(&c.early);
    const int half = c.half_of(epoch_of(word));
    int64_t most = 0;
    for (int r = 0; r < c.ranks; ++r) most = rows_R[r] > most ? rows_R[r] : most;
    // This team's tasks lie together, so that all of its warps have some.
    const int64_t tasks = c.chunks(most) * (c.ranks - 1), of = ceil_div(tasks, team.blocks());
    const int64_t first = of * team.block(), left = tasks - first, n = left < of ? left : of;
    const int64_t pieces = rows.pieces();
    team.each_warp(n * c.chunk_rows * pieces, [&](auto& warp, int64_t i) {
      const Split piece(i, pieces), row(piece.item, c.chunk_rows);
      const ChunkTask task = chunk_task(first + row.item, c.rank, c.ranks);
      const int64_t j = task.chunk * c.chunk_rows + row.rest;
      if (j >= rows_R[task.peer]) return;
      std::byte* const record = c.record_in(half, task.peer, c.rank, j, rows.staged.record);
      store_piece(warp, p.plan, rows, rows.part[0], token_RJ[task.peer * kTokenBlock + j],
                  piece.rest, {record, record, &rows.staged});
    });
    team.sync();
    team.each(n, [&](int64_t i) {
      const ChunkTask task = chunk_task(first + i, c.rank, c.ranks);
      if (task.chunk * c.chunk_rows >= rows_R[task.peer]) return;
      store_release(c.ready_word_in(half, task.peer, c.rank, task.chunk), word);
    });
    if (!come_to(team, c, c.settled, c.numbered)) return;
    FindSlots{control, p}.find(team, c.half_of(epoch_of(word) - 1));
  }
};

}  // namespace moiety::moe::peers
