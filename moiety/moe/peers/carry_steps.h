// What stands around the operations of a communicator that carry boxes among ranks on GPUs which do
// not map each other's memory (docs/spec/ep.md#collectives). The other steps are the same: what they
// store for a peer goes to this rank's box for it, and when boxes have come their words are set here.
#pragma once

#include "moiety/moe/peers/wait.h"

namespace moiety::moe::peers {

// A rank's entry, as all ranks gather it.
struct Greeting {
  Entry entry;
  uint64_t rest = 0;
};
static_assert(sizeof(Greeting) == 32);

struct Greet {
  static constexpr int kThreads = 32, kBlocks = 1;
  Control* control;
  Greeting* greetings_R;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    team.one([&] { greetings_R[control->rank] = {control->entry}; });
  }
};

// Compares the entries, and sets the words that peers would have set. `fault`, if there is one, is
// not 0 when the communicator has failed, whose error says why.
struct Arrive {
  static constexpr int kThreads = 256, kBlocks = 1;
  Control* control;
  const Greeting* greetings_R;
  const uint64_t* fault;

  template <class Team>
  MOIETY_STEP void operator()(Team& team) const {
    Control& c = *control;
    if (failed(team, c)) return;
    team.each(c.ranks - 1, [&](int64_t i) {
      const int r = c.peer(i);
      const Entry& theirs = greetings_R[r].entry;
      if (same_entry(theirs, c.entry)) return;
      // One of an older epoch has not come: that is the communicator's error.
      const bool came = epoch_of(theirs.word) >= c.epoch;
      came ? poison_mismatch(c, r, theirs) : static_cast<void>(exchange(&c.failed, 1));
    });
    team.one([&] {
      if (fault && load_acquire(fault) != 0) exchange(&c.failed, 1);
    });
    team.sync();
    if (failed(team, c)) return;
    for (int i = 0; i + 1 < c.ranks; ++i) {
      const int r = c.peer(i);
      team.each(c.layout.chunks + 1, [&](int64_t chunk) {
        store_release(c.ready_word(c.rank, r, chunk), c.entry.word);
      });
      team.one([&] {
        store_relaxed(c.entry_word(c.rank, c.layout.width, r), uint64_t(c.entry.row_bytes));
        store_relaxed(c.entry_word(c.rank, c.layout.plan, r), uint64_t(c.entry.plan));
        store_release(c.entry_word(c.rank, c.layout.head, r), c.entry.word);
        store_release(c.word(c.rank, c.layout.credit, r), uint64_t(c.epoch));
      });
    }
  }
};

}  // namespace moiety::moe::peers
