// The steps in which a rank meets its peers. They are the only ones that wait, each in a grid of
// one block, so that what waits holds one block of a GPU, and ranks that share it come to their
// turn (docs/adr/0035-expert-parallelism-on-gpus.md).
#pragma once

#include "moiety/moe/peers/plan_view.h"
#include "moiety/moe/peers/wait.h"

namespace moiety::moe::peers {

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

// Takes the next epoch; returns when all peers have read what this rank's stores will overwrite.
struct Enter {
  static constexpr int kThreads = 64;
  Control* control;
  uint32_t signature;
  int64_t row_bytes;
  Epoch plan;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    Control& c = *control;
    team.one([&] {
      ++c.epoch;
      c.entry = {uint64_t(c.epoch) << kSignatureBits | signature, row_bytes, plan};
      if (c.open == 0) tell_host(c, {.kind = kReleased, .mine = c.entry});
      if (look(&c.failed) == 0) poisoned(c);
    });
    team.sync();
    if (failed(team, c)) return;
    const uint64_t start = nanoseconds();
    team.each(c.ranks - 1, [&](int64_t i) {
      const int r = c.peer(i);
      wait(c, c.word(c.rank, c.layout.credit, r), 0, c.epoch - c.depth, {.from = r});
    });
    end_waits(team, c, start);
    if (failed(team, c)) return;
    team.one([&] { c.entered_ns = nanoseconds(); });
    team.each(c.ranks - 1, [&](int64_t i) {
      const int r = c.peer(i);
      store_relaxed(c.entry_word(r, c.layout.addr, c.rank), ~uint64_t{0});  // rows are staged
      store_relaxed(c.entry_word(r, c.layout.width, c.rank), uint64_t(c.entry.row_bytes));
      store_relaxed(c.entry_word(r, c.layout.plan, c.rank), uint64_t(c.entry.plan));
      store_release(c.entry_word(r, c.layout.head, c.rank), c.entry.word);
    });
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
    Control& c = *control;
    if (failed(team, c)) return;
    const uint64_t start = nanoseconds();
    for (int i = 0; i + 1 < c.ranks; ++i) {
      const int s = c.peer(i);
      const int64_t of = c.chunks(home ? plan.rows(c.rank, s) : plan.rows(s, c.rank));
      team.each(of, [&](int64_t chunk) {
        if (look(&c.failed) != 0) return;
        wait(c, c.ready_word(c.rank, s, chunk), kSignatureBits, c.epoch,
             {.from = s, .chunk = chunk, .of = of});
      });
    }
    team.sync();
    team.one([&] {
      c.rows_ns = nanoseconds() - c.entered_ns;
      count_wait(c, start);
    });
    team.each(c.ranks - 1, [&](int64_t i) {
      if (look(&c.failed) == 0) meet(c, c.peer(i));
    });
  }
};

// Says that everything that peers sent has been read. The grid before it has ended, so all of its
// loads have returned.
struct Leave {
  static constexpr int kThreads = 64;
  Control* control;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    Control& c = *control;
    if (failed(team, c)) return;
    team.each(c.ranks - 1, [&](int64_t i) {
      store_release(c.word(c.peer(i), c.layout.credit, c.rank), uint64_t(c.epoch));
    });
  }
};

}  // namespace moiety::moe::peers
