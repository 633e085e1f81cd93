// The steps in which a rank meets its peers. They are the only ones that wait, each in a grid of
// one block, so that what waits holds one block of a GPU, and ranks that share it come to their
// turn (docs/adr/0035-expert-parallelism-on-gpus.md).
#pragma once

#include "moiety/moe/peers/plan_view.h"
#include "moiety/moe/peers/wait.h"

namespace moiety::moe::peers {

// Calls f on the team's last thread, which has the least to do.
template <class Team, class F>
MOIETY_STEP void on_last(Team& team, F&& f) {
  const int64_t threads = 32 * team.warps();
  team.each(threads, [&](int64_t i) {
    if (i + 1 == threads) f();
  });
}

// What the group waits for from here on has other work beside it, until the stream of that work
// comes to Join.
struct SetApart {
  static constexpr int kThreads = 32;
  Control* control;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    team.one([&] { store_relaxed(&control->joined_ns, uint64_t{0}); });
  }
};
struct Join {
  static constexpr int kThreads = 32;
  Control* control;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    team.one([&] { store_relaxed(&control->joined_ns, nanoseconds()); });
  }
};

// Where this rank's rows of an operation lie, as peers are told: {number of the attached buffer,
// offset in it} and the distance of rows, or that they do not reach them.
struct OwnRows {
  static constexpr int kOffsetBits = 48;
  static constexpr uint64_t kStaged = ~uint64_t{0};
  uint64_t address = kStaged;
  int64_t pitch = 0;

  MOIETY_HD_INLINE bool direct() const { return address != kStaged; }
};

// Tells rank r of this rank's entry, which it may read when the head is there.
MOIETY_STEP void store_entry(const Control& c, int r, int half, const Entry& entry,
                             const OwnRows& own) {
  const auto word = [&](int64_t array) { return c.word(r, array, half * c.ranks + c.rank); };
  store_relaxed(word(c.layout.addr), own.address);
  store_relaxed(word(c.layout.pitch), uint64_t(own.pitch));
  store_relaxed(word(c.layout.width), uint64_t(entry.row_bytes));
  store_relaxed(word(c.layout.plan), uint64_t(entry.plan));
}
MOIETY_STEP void post_head(const Control& c, int r, int half, const Entry& entry) {
  store_release(c.word(r, c.layout.head, half * c.ranks + c.rank), entry.word);
}
template <class Team>
MOIETY_STEP void post_entries(Team& team, const Control& c, const OwnRows& own) {
  team.each(c.ranks - 1, [&](int64_t i) {
    store_entry(c, c.peer(i), c.half(), c.entry, own);
    post_head(c, c.peer(i), c.half(), c.entry);
  });
}

// Takes the next epoch, whose words `begin` sets; on one thread. False if the group has failed.
template <class Begin>
MOIETY_STEP bool begin_epochs(Control& c, Begin&& begin) {
  c.begin_epoch();
  begin();
  if (c.open == 0) tell_host(c, {.kind = kReleased, .mine = c.entry});
  return look(&c.failed) == 0 && !poisoned(c);
}
// Returns when all peers have read what this rank's stores up to `ahead` epochs later will overwrite.
// False if the group has failed.
template <class Team>
MOIETY_STEP bool await_credits(Team& team, Control& c, Epoch ahead) {
  const uint64_t start = nanoseconds();
  bool here = true;
  team.each(c.ranks - 1, [&](int64_t i) {
    const int r = c.peer(i);
    const uint64_t* credit = c.word(c.rank, c.layout.credit, r);
    here = wait(c, credit, 0, c.epoch + ahead - c.depth, {.from = r}) && here;
  });
  if (team.any(!here)) return false;
  team.one([&] {
    count_wait(c, start);
    c.began_ns = nanoseconds();
  });
  return true;
}

// Both.
template <class Team, class Begin>
MOIETY_STEP bool enter_epochs(Team& team, Control& c, Epoch ahead, Begin&& begin) {
  bool begun = true;
  team.one([&] { begun = begin_epochs(c, begin); });
  return !team.any(!begun) && await_credits(team, c, ahead);
}

// Takes the next epoch; returns when all peers have read what this rank's stores will overwrite. Where
// rows may be direct it tells of its entry, and returns when all have said whether theirs are; else
// the entry is told later, by what stores.
struct Enter {
  static constexpr int kThreads = 64;
  Control* control;
  uint32_t signature;
  int64_t row_bytes;
  Epoch plan;
  OwnRows own = {};
  bool may_be_direct = false, pulls = false;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    Control& c = *control;
    const bool entered = enter_epochs(team, c, 0, [&] {
      c.entry = {uint64_t(c.epoch) << kSignatureBits | signature, row_bytes, plan};
      c.pulls = pulls;
    });
    if (!entered) return;
    if (!may_be_direct) return team.each(c.ranks, [&](int64_t r) { c.direct_R[r] = {}; });
    post_entries(team, c, own);
    const uint64_t posted = nanoseconds();
    team.each(c.ranks, [&](int64_t r) { c.direct_R[r] = find_direct(c, static_cast<int>(r)); });
    end_waits(team, c, posted);
  }

 private:
  MOIETY_STEP Direct find_direct(Control& c, int r) const {
    if (r != c.rank && !meet(c, r)) return {};
    const bool mine = r == c.rank;
    const uint64_t address =
        mine ? own.address : load_relaxed(c.entry_word(c.rank, c.layout.addr, r));
    if (address == OwnRows::kStaged) return {};
    const auto pitch = static_cast<int64_t>(load_relaxed(c.entry_word(c.rank, c.layout.pitch, r)));
    const uint64_t offset = address & ((uint64_t{1} << OwnRows::kOffsetBits) - 1);
    return {c.attached[address >> OwnRows::kOffsetBits][r] + offset, mine ? own.pitch : pitch};
  }
};

// Returns when all chunks that peers send are here, and all peers run the same operation. `home`:
// whether they send what this rank's own tokens brought them, else what their tokens bring here.
struct Await {
  static constexpr int kThreads = 256;
  Control* control;
  PlanView plan;
  bool home;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    if (failed(team, *control)) return;
    const uint64_t start = nanoseconds();
    look_out(team, [](int64_t thread) { return thread; });
    team.sync();
    came(team, start);
  }
  // Waits; thread i of the team for what would be number_of(i)'s.
  template <class Team, class Number>
  MOIETY_STEP void look_out(Team& team, Number&& number_of) const {
    Control& c = *control;
    const int64_t threads = 32 * team.warps();
    for (int i = 0; i + 1 < c.ranks; ++i) {
      const int s = c.peer(i);
      const int64_t rows = home ? plan.rows(c.rank, s) : plan.rows(s, c.rank);
      const int64_t of = c.pulled(s) ? 0 : c.chunks(rows), all = of > 0 ? of : 1;
      team.each(round_up(all, threads), [&](int64_t at) {
        const Split turn(at, threads);
        const int64_t chunk = turn.item * threads + number_of(turn.rest);
        if (chunk >= all || look(&c.failed) != 0) return;
        const bool came = chunk >= of || wait(c, c.ready_word(c.rank, s, chunk), kSignatureBits,
                                              c.epoch, {.from = s, .chunk = chunk, .of = of});
        if (came && chunk == 0) meet(c, s);
      });
    }
  }
  // What has been waited for since `start` is here.
  template <class Team>
  MOIETY_STEP void came(Team& team, uint64_t start) const {
    Control& c = *control;
    team.one([&] {
      c.rows_ns = nanoseconds() - c.began_ns;
      count_wait(c, start);
    });
  }
};

// A step that stores for peers, whose last block to have stored then waits for what they store, if it
// `awaits`: of `storing` blocks, the first ones. It also tells them of this rank's entry, unless it
// has been told.
template <class Step>
struct ThenAwait {
  static constexpr int kThreads = Step::kThreads;
  Step step;
  Await await;
  bool told, awaits;
  int64_t storing;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    Control& c = *await.control;
    if (team.block() == 0) team.one([&] { c.began_ns = nanoseconds(); });
    if (!told && team.block() + 1 == storing && !failed(team, c)) post_entries(team, c, {});
    step(team);
    if (!awaits || team.block() >= storing) return;
    team.sync();
    bool last = false;
    team.one([&] { last = comes_last(&await.control->ticket, storing); });
    if (team.any(last)) await(team);
  }
};

// Says that everything that peers sent up to this epoch has been read.
template <class Team>
MOIETY_STEP void give_credits(Team& team, const Control& c) {
  team.each(c.ranks - 1, [&](int64_t i) {
    store_release(c.word(c.peer(i), c.layout.credit, c.rank), uint64_t(c.epoch));
  });
}

// Returns when all homes have read the rows of this rank, which stay as they are until then.
struct AwaitReaders {
  static constexpr int kThreads = 64;
  Control* control;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    Control& c = *control;
    if (failed(team, c)) return;
    const uint64_t start = nanoseconds();
    team.each(c.ranks - 1, [&](int64_t i) {
      const int r = c.peer(i);
      wait(c, c.word(c.rank, c.layout.credit, r), 0, c.epoch, {.from = r});
    });
    end_waits(team, c, start);
  }
};

// The last step of an operation. When all blocks have done their part, so that all of their loads
// have returned, the last one gives the credits; what step.behind(team) does reads nothing of peers.
template <class Step>
struct Last {
  static constexpr int kThreads = Step::kThreads;
  Step step;
  Control* control;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    Control& c = *control;
    step(team);
    team.sync();
    bool last = false;
    team.one([&] { last = comes_last(&c.ticket, team.blocks()); });
    if (team.any(last)) {
      team.one([&] { c.early = c.settled = c.numbered = 0; });
      if (look(&c.failed) == 0) give_credits(team, c);
    }
    if constexpr (requires { step.behind(team); }) step.behind(team);
  }
};

}  // namespace moiety::moe::peers
