// How rows move among GPU ranks: the first blocks of a grid push them to peers, chunk by chunk; the
// others look after own rows, and then take what has come. They wait a little for a chunk, but not
// until it comes: what is not here yet is taken by a second grid, when everything is.
#pragma once

#include "moiety/moe/peers/meet_steps.h"

namespace moiety::moe::peers {

// Number i of things of which an item has `each`. There are fewer than 2^32 of them, since the rows
// of more would not fit into a memory.
struct Split {
  int64_t item, rest;

  MOIETY_HD_INLINE Split(int64_t i, int64_t each) {
    const auto number = static_cast<uint32_t>(i), by = static_cast<uint32_t>(each);
    item = number / by;
    rest = number % by;
  }
};

// Which part of the rows a step takes.
enum class Taking : uint8_t {
  kFirst,  // own rows, and those that have come
  kRest,   // what is left
};

// A warp waits so long for a chunk while others of its grid push. Ranks that share a GPU may keep
// each other's blocks from it, so it must end; it is longer than two chunks of a busy link are apart.
inline constexpr uint64_t kPatienceNs = 50000;

// Whether chunk `number` of sender s is here.
MOIETY_STEP bool has_come(const Control& c, int s, int64_t number) {
  return load_acquire(c.ready_word(c.rank, s, number)) == c.entry.word;
}

// Calls take(warp, i) for i < n, of which each warp of the grid has a share. In kFirst it leaves a
// warp's share from the first i on for which here(warp, i) is not true in time.
template <class Team, class Here, class Take>
MOIETY_STEP void take_share(Team& team, Control& c, Taking taking, int64_t n, Here&& here,
                            Take&& take) {
  team.grid_warp([&](auto& warp, int64_t number, int64_t warps) {
    int64_t& next = c.scratch.next_W[number];
    if (taking == Taking::kRest) {
      for (int64_t i = next; i < n; i += warps) take(warp, i);
      return;
    }
    const auto in_time = [&](int64_t i) {
      if (here(warp, i)) return true;
      const uint64_t start = nanoseconds();
      bool is_here = false;
      do {
        rest_a_little();
        is_here = here(warp, i);
      } while (!is_here &&
               warp.all(1, [&](int64_t) { return nanoseconds() - start < kPatienceNs; }));
      warp.one([&] { add(&c.taker_ns, static_cast<unsigned long long>(nanoseconds() - start)); });
      return is_here;
    };
    int64_t i = number;
    for (; i < n && in_time(i); i += warps) take(warp, i);
    warp.one([&] { next = i; });
  });
}

// take_share of rows that peers send here: take(warp, source rank, row j, i) for i < each of every
// row. Peers take turns, chunk by chunk, as they send.
template <class Team, class Take>
MOIETY_STEP void take_rows(Team& team, Control& c, const PlanView& plan, Taking taking,
                           int64_t each, Take&& take) {
  int64_t most = 0;
  for (int s = 0; s < c.ranks; ++s) {
    const int64_t n = s == c.rank ? 0 : plan.rows(s, c.rank);
    most = n > most ? n : most;
  }
  struct Place {
    ChunkTask task;
    int64_t row, rest;
  };
  const auto place_of = [&](int64_t i) -> Place {
    const Split piece(i, each), row(piece.item, c.chunk_rows);
    const Split turn(row.item, c.ranks - 1);
    const ChunkTask task{c.peer(turn.rest), turn.item};
    return {task, task.chunk * c.chunk_rows + row.rest, piece.rest};
  };
  take_share(
      team, c, taking, c.chunks(most) * (c.ranks - 1) * c.chunk_rows * each,
      [&](auto& warp, int64_t i) {
        const Place at = place_of(i);
        if (at.row >= plan.rows(at.task.peer, c.rank)) return true;
        return warp.all(1, [&](int64_t) { return has_come(c, at.task.peer, at.task.chunk); });
      },
      [&](auto& warp, int64_t i) {
        const Place at = place_of(i);
        if (at.row < plan.rows(at.task.peer, c.rank)) take(warp, at.task.peer, at.row, at.rest);
      });
}

// Calls push(peer, chunk) for the chunks of this block among those that go to peers, of which `rows`
// tells the number of rows.
template <class Team, class Rows, class Push>
MOIETY_STEP void for_chunks(Team& team, const Control& c, Rows&& rows, Push&& push) {
  int64_t most = 0;
  for (int r = 0; r < c.ranks; ++r) {
    const int64_t n = r == c.rank ? 0 : rows(r);
    most = n > most ? n : most;
  }
  const int64_t tasks = c.chunks(most) * (c.ranks - 1);
  for (int64_t i = team.block(); i < tasks; i += team.blocks()) {
    const ChunkTask task = chunk_task(i, c.rank, c.ranks);
    const int64_t n = rows(task.peer), begin = task.chunk * c.chunk_rows;
    if (begin >= n) continue;
    push(task, begin, begin + c.chunk_rows < n ? c.chunk_rows : n - begin);
  }
}

// Pushes in the first `pushers` blocks and takes in the others. The last block waits for all chunks.
template <class Push, class Take>
struct Move {
  static constexpr int kThreads = Take::kThreads, kBlocks = Take::kBlocks;
  Push push;
  Take take;
  int64_t pushers;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    Control& c = *take.control;
    if (failed(team, c)) return;
    const int64_t takers = team.blocks() - pushers;
    if (team.block() < pushers) {
      Team part = team.part(0, pushers);
      push(part, c);
      team.one([&] { raise(&c.pushed_ns, static_cast<unsigned long long>(nanoseconds())); });
    } else {
      Team part = team.part(pushers, takers);
      take(part, c, Taking::kFirst);
    }
    if (!team.last(&c.ticket)) return;
    team.one([&] { c.waited_ns += c.taker_ns / static_cast<uint64_t>(takers * team.warps()); });
    await_chunks(team, c, take.plan, Take::kHome);
  }
};

// Takes what Move has left, in as many blocks as took there, and gives the credits.
template <class Take>
struct TakeRest {
  static constexpr int kThreads = Take::kThreads, kBlocks = Take::kBlocks;
  Take take;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    Control& c = *take.control;
    if (failed(team, c)) return;
    take(team, c, Taking::kRest);
    if (team.last(&c.ticket)) give_credits(team, c);
  }
};

}  // namespace moiety::moe::peers
