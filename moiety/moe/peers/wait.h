// Waits for words of peers, inside a step; and what happens when one does not come. Nothing traps:
// a rank that finds a fault tells its host and all peers, and from then on no step of the group
// does anything.
#pragma once

#include "moiety/moe/peers/control.h"

namespace moiety::moe::peers {

// Tells the host of a fault, if it is the rank's first. True on the thread that told it.
MOIETY_STEP bool tell_host(Control& c, const Fault& fault) {
  exchange(&c.failed, 1);
  if (exchange(&c.told, 1) != 0) return false;
  c.page->fault = fault;
  store_release(&c.page->found, 1);
  return true;
}

// Ends the waits of all ranks, for this reason; of an abort every rank hears by itself.
MOIETY_STEP void poison_all(Control& c, const Fault& fault) {
  if (!tell_host(c, fault)) return;
  const auto kind = static_cast<Failure>(fault.kind);
  const uint64_t value = poison_word(kind, c.rank, fault.about, c.epoch);
  const uint64_t reason[kReasonWords] = {
      fault.mine.word,   uint64_t(fault.mine.row_bytes),   uint64_t(fault.mine.plan),
      fault.theirs.word, uint64_t(fault.theirs.row_bytes), uint64_t(fault.theirs.plan)};
  for (int r = 0; r < c.ranks; ++r) {
    if (kind == Failure::kAborted && r != c.rank) continue;
    for (int i = 0; i < kReasonWords; ++i) {
      store_relaxed(c.word(r, c.layout.reason, kReasonWords * c.rank + i), reason[i]);
    }
    if (load_relaxed(c.poison(r)) == 0) store_release(c.poison(r), value);
  }
}

// Whether a fault is known: the same on all threads of the team, which all ask, since a step of
// which only some went on would stand still at its next barrier.
template <class Team>
MOIETY_STEP bool failed(Team& team, const Control& c) {
  return team.any(look(&c.failed) != 0);
}

// Whether a rank has poisoned the group; then the host hears of it.
MOIETY_STEP bool poisoned(Control& c) {
  const uint64_t poison = load_acquire(c.poison(c.rank));
  if (poison == 0) return false;
  Fault fault{.kind = kStopped, .poison = poison};
  for (int i = 0; i < kReasonWords; ++i) {
    fault.reason[i] =
        load_relaxed(c.word(c.rank, c.layout.reason, kReasonWords * origin_of(poison) + i));
  }
  tell_host(c, fault);
  return true;
}

// The peer's entry of this epoch, of which `head` or a later word has been seen.
MOIETY_STEP Entry entry_of(const Control& c, int peer, uint64_t head) {
  return {head, static_cast<int64_t>(load_relaxed(c.entry_word(c.rank, c.layout.width, peer))),
          static_cast<Epoch>(load_relaxed(c.entry_word(c.rank, c.layout.plan, peer)))};
}
MOIETY_STEP bool same_entry(const Entry& a, const Entry& b) {
  return a.word == b.word && a.row_bytes == b.row_bytes && a.plan == b.plan;
}
MOIETY_STEP bool differs(const Control& c, int peer, uint64_t head) {
  return epoch_of(head) == c.epoch && !same_entry(entry_of(c, peer, head), c.entry);
}
MOIETY_STEP void poison_mismatch(Control& c, int peer, const Entry& theirs) {
  poison_all(c, {.kind = static_cast<uint32_t>(Failure::kMismatch),
                 .about = peer,
                 .mine = c.entry,
                 .theirs = theirs});
}

MOIETY_STEP void poison_late(Control& c, const uint64_t* word, int shift, Epoch wanted,
                             Awaited awaited) {
  // Threads wait for chunks side by side: the first that is missing is the one that is told.
  for (int64_t i = 0; i < awaited.chunk && awaited.of > 0; ++i) {
    const uint64_t* earlier = c.ready_word(c.rank, awaited.from, i);
    if (epoch_of(load_acquire(earlier)) >= wanted) continue;
    word = earlier;
    awaited.chunk = i;
  }
  uint64_t newest = 0;
  for (int h = 0; h < c.depth; ++h) {
    const uint64_t head = load_acquire(c.word(c.rank, c.layout.head, h * c.ranks + awaited.from));
    newest = head > newest ? head : newest;
  }
  poison_all(c, {.kind = static_cast<uint32_t>(Failure::kLate),
                 .about = awaited.from,
                 .late = {.rank = c.rank,
                          .awaited = awaited,
                          .entered = c.entry.word,
                          .word = load_acquire(word),
                          .newest = newest,
                          .wanted = wanted,
                          .shift = shift}});
}

// Looks at a word until its epoch (its bits from `shift` on) is at least `wanted`, and returns it;
// 0 if it never will be. A peer that has entered this epoch with another entry will never post it.
MOIETY_STEP uint64_t poll(Control& c, const uint64_t* word, int shift, Epoch wanted,
                          const Awaited& awaited) {
  const uint64_t* head = c.entry_word(c.rank, c.layout.head, awaited.from);
  const uint64_t start = nanoseconds();
  uint64_t looked = start;
  for (uint32_t polls = 1;; ++polls) {
    const uint64_t seen = load_acquire(word);
    if (static_cast<Epoch>(seen >> shift) >= wanted) return seen;
    const uint64_t entered = load_acquire(head);
    if (differs(c, awaited.from, entered)) {
      poison_mismatch(c, awaited.from, entry_of(c, awaited.from, entered));
      return 0;
    }
    pause();
    if (polls % 256 != 0) continue;
    if (poisoned(c)) return 0;
    const uint64_t now = nanoseconds();
    if (now - start > c.deadline_ns) {
      poison_late(c, word, shift, wanted, awaited);
      return 0;
    }
    if (now - looked < 100000) continue;
    looked = now;
    if (load_relaxed(&c.page->abort) == 0) continue;
    poison_all(
        c,
        {.kind = static_cast<uint32_t>(Failure::kAborted), .about = awaited.from, .mine = c.entry});
    return 0;
  }
}

// Waits until the word's epoch (its bits from `shift` on) is at least `wanted`; false if it never
// will be, or it is a word of another entry.
MOIETY_STEP bool wait(Control& c, const uint64_t* word, int shift, Epoch wanted,
                      const Awaited& awaited) {
  const uint64_t mine = c.entry.word;
  uint64_t seen = load_acquire(word);
  if (static_cast<Epoch>(seen >> shift) < wanted) {
    seen = poll(c, word, shift, wanted, awaited);
    if (seen == 0) return false;
  }
  if (shift == 0 || seen == mine) return true;
  if (epoch_of(seen) == c.epoch) {
    poison_mismatch(c, awaited.from, entry_of(c, awaited.from, seen));
  } else {
    poison_all(c, {.kind = static_cast<uint32_t>(Failure::kProtocol),
                   .about = awaited.from,
                   .mine = c.entry,
                   .theirs = {.word = seen}});
  }
  return false;
}

// Counts a wait that began at `start`, as far as nothing else ran beside it.
MOIETY_STEP void count_wait(Control& c, uint64_t start) {
  const uint64_t joined = load_relaxed(&c.joined_ns);
  if (joined == 0) return;
  const uint64_t now = nanoseconds(), alone = joined > start ? joined : start;
  if (now > alone) c.waited_ns += now - alone;
}
// Ends waits of a team that began at `start`: all threads are here, and their time is counted.
template <class Team>
MOIETY_STEP void end_waits(Team& team, Control& c, uint64_t start) {
  team.sync();
  team.one([&] { count_wait(c, start); });
}

// Returns when the peer is in this epoch, too; false unless it runs the same operation.
MOIETY_STEP bool meet(Control& c, int peer) {
  if (!wait(c, c.entry_word(c.rank, c.layout.head, peer), kSignatureBits, c.epoch,
            {.from = peer})) {
    return false;
  }
  const Entry theirs = entry_of(c, peer, c.entry.word);
  if (same_entry(theirs, c.entry)) return true;
  poison_mismatch(c, peer, theirs);
  return false;
}

}  // namespace moiety::moe::peers
