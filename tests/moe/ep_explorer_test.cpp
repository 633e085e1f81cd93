// The protocol of docs/spec/ep.md#mapped-memory as a small transition system, run through all
// interleavings: no rank ever reads a row that has been overwritten or is being written, no head is
// overwritten while its reader needs it, there is always a step to take, and no operation ends
// among ranks that entered different ones. With an edge or a comparison of the protocol taken away
// the explorer must find what goes wrong.
//
// With zero-copy the operands of odd ranks are direct: rows are stored into them, or read from them
// by their homes, and nobody may touch them before their owner has entered the operation, nor after
// it has ended.
//
// A rank has two roles inside an operation, one that stores and one that reads, as kernels have;
// the CPU path, which stores first, is one of the interleavings.
#include <cstring>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include <gtest/gtest.h>

namespace moiety::moe {
namespace {

constexpr int kMaxRanks = 3, kMaxDepth = 3;

enum class Op : uint8_t {
  kPrepare,  // messages
  kCopy,     // rows from all to all
  kToHot,    // all rows go to rank 0
  kFromHot,  // and come back
  kToken,    // as a reduction in token order: one array for the rows of all senders
  kDirect,   // a copy into the rows of odd ranks, and into the regions of even ones
  kPull,     // kToken where homes read the rows of odd ranks
  // Of prepare_dispatch: a prepare, and a copy whose rows are stored before messages are read.
  kEarly,
  kEarlyRows,
};
constexpr int kOps = 7;

enum class Fault {
  kNone,
  kNoCredits,        // stores without waiting for credits
  kCreditTooOld,     // waits for the credit of epoch n - depth - 1
  kCreditUnread,     // gives its credit before it has read what came
  kCreditPerSender,  // gives a sender its credit when that sender's rows are read, not all
  kNoReady,          // reads without waiting for the flag
  kFlagFirst,        // flag before data
  kCreditTooNew,     // waits for the credit of its own epoch
  kReadThenStore,    // stores nothing before it has all rows of the epoch
  kHeadFirst,        // head before the other words of its entry
  kAnyOperation,     // does not compare the operations of entries
  kAnyWidth,
  kAnyPlan,
  kMeetsSenders,  // compares the entries of those alone that send it rows
  kAnyAddress,    // stores into direct rows without waiting for their owner's entry
  kEndsAtOnce,    // an owner does not wait for those that read its rows
  kRecordsLast,   // late records behind the entry that tells of them
};

// The words of an entry; the operation is in the head.
enum Word { kOperation, kWidth, kPlan, kWords };

// A rank whose operation `epoch` differs from the others' in one word.
struct Stray {
  int rank = -1, epoch = 0;
  Word word = kPlan;
};

struct Protocol {
  int ranks, depth;
  std::vector<Op> ops;
  Fault fault = Fault::kNone;
  Stray stray = {};
  // Entries are told behind the rows, as GPU ranks may where nobody waits for them before.
  bool late_entries = false;
  // The messages of kEarly bring counts, and the entry of kEarlyRows tells of their records, as GPU
  // ranks do.
  bool late_records = false;
};

// Words and cells hold epochs. All members are bytes, so a state is hashed as bytes.
struct State {
  struct Rank {
    uint8_t done, heads, stored, read, credits;  // operations; steps of the current one
    uint8_t next_heads, next_stored;             // steps of kEarlyRows, while kEarly runs
  } rank[kMaxRanks];
  uint8_t credit[kMaxRanks][kMaxRanks];           // [at][from]
  uint8_t head[kMaxDepth][kMaxRanks][kMaxRanks];  // [half][at][from]
  uint8_t entry[kMaxDepth][kMaxRanks][kMaxRanks][kWords];
  uint8_t ready[2][kMaxDepth][kMaxRanks][kMaxRanks];   // [data, messages][half][at][from]
  uint8_t memory[2][kMaxDepth][kMaxRanks][kMaxRanks];  // [data, messages][half][at][place]
  uint8_t rows[kMaxRanks][kMaxRanks];  // [at][from]: direct rows, of one operation at a time
  uint8_t records[kMaxDepth][kMaxRanks][kMaxRanks];  // [half][at][from]: late records
};
constexpr uint8_t kTorn = 0x80;  // a cell that is being written

class Explorer {
 public:
  explicit Explorer(Protocol p) : p_(std::move(p)) {}

  // The fault of the protocol; "ok" if there is none.
  std::string run() {
    State start;
    std::memset(&start, 0, sizeof(start));
    visit(start);
    while (!open_.empty() && error_.empty()) {
      const State state = open_.back();
      open_.pop_back();
      bool stuck = true, ended = true;
      for (int a = 0; a < p_.ranks; ++a) {
        ended = ended && state.rank[a].done == p_.ops.size();
        for (const bool reader : {false, true}) {
          State next = state;
          named_ = false;
          if (!step(next, a, reader)) continue;
          stuck = false;
          if (!named_) visit(next);
        }
      }
      if (stuck && !ended) error_ = "deadlock";
    }
    return error_.empty() ? "ok" : error_;
  }
  size_t states() const { return seen_.size(); }

 private:
  // States are told apart by 64 bits of hash: of a million, two are alike once in 10^7 runs.
  void visit(const State& s) {
    const std::string_view bytes(reinterpret_cast<const char*>(&s), sizeof(s));
    if (seen_.insert(std::hash<std::string_view>()(bytes)).second) open_.push_back(s);
  }
  void expect(bool holds, const char* text) {
    if (!holds) error_ = text;
  }

  // A rank stops all with an error.
  void name_difference() {
    named_ = true;
    expect(p_.stray.rank >= 0, "ranks that agree are told apart");
  }

  // A word of the entry of rank a. It is never that of the epoch whose place it takes.
  uint8_t content(int a, int n, int word) const {
    const Stray& x = p_.stray;
    return static_cast<uint8_t>(1 + n % 4 + 5 * (a == x.rank && n == x.epoch && word == x.word));
  }
  bool agrees(const State& s, int a, int from, int n, int half) const {
    static constexpr Fault kAny[] = {Fault::kAnyOperation, Fault::kAnyWidth, Fault::kAnyPlan};
    for (int word = 0; word < kWords; ++word) {
      if (p_.fault == kAny[word]) continue;
      if (s.entry[half][a][from][word] != content(a, n, word)) return false;
    }
    return true;
  }

  int peer(int a, int i) const { return (a + 1 + i) % p_.ranks; }
  static bool sends(Op op, int from, int to) {
    return (op != Op::kToHot || to == 0) && (op != Op::kFromHot || from == 0);
  }
  static bool messages(Op op) { return op == Op::kPrepare || op == Op::kEarly; }
  static bool direct(int rank) { return rank % 2 == 1; }
  static bool stores_direct(Op op, int to) { return op == Op::kDirect && direct(to); }
  static bool pulls(Op op, int from) { return op == Op::kPull && direct(from); }
  // Whether the caller of rank r has given the operand of epoch n, and not got it back.
  static bool in_operation(const State& s, int r, int n) {
    return s.rank[r].done == n - 1 && s.rank[r].heads > 0;
  }
  // The place of the rows of sender s: those of kToken move about.
  int place(Op op, int s) const {
    return op == Op::kToken || op == Op::kPull ? (s + 1) % p_.ranks : s;
  }
  // The epoch whose words and rows a rank may still look at.
  int reading(const State& s, int r) const {
    const State::Rank& rank = s.rank[r];
    const int steps = 2 * (p_.ranks - 1);
    const bool ended = rank.heads == steps && rank.stored == steps && rank.read == steps;
    return rank.done + (ended ? 2 : 1);
  }

  // The next step of a role of rank a; false if it has none or must wait.
  bool step(State& s, int a, bool reader) {
    State::Rank& me = s.rank[a];
    if (me.done == p_.ops.size()) return false;
    const int peers = p_.ranks - 1, n = me.done + 1, half = n % p_.depth;
    const int steps = 2 * peers;
    const bool early = p_.ops[n - 1] == Op::kEarly;
    if (reader) return me.heads == steps && me.read < steps && read(s, a, n, half);
    if (me.heads + me.stored < 2 * steps) return send(s, a, n, me.heads, me.stored);
    if (early && me.next_heads + me.next_stored < 2 * steps) {
      return send(s, a, n + 1, me.next_heads, me.next_stored);
    }
    const bool early_credit = p_.fault == Fault::kCreditUnread && me.credits < peers;
    return (me.read == steps || early_credit) && post_credit(s, a, n);
  }

  // The entry, and the rows.
  bool send(State& s, int a, int n, uint8_t& heads, uint8_t& stored) {
    const Op op = p_.ops[n - 1];
    const bool late = p_.late_entries && op != Op::kDirect && op != Op::kPull;
    const bool stores = late ? stored < 2 * (p_.ranks - 1) : heads == 2 * (p_.ranks - 1);
    if (stores) return (!late || credited(s, a, n)) && store(s, a, n, stored);
    return credited(s, a, n) && post_entry(s, a, n, heads);
  }
  // Whether all peers have read what the stores of epoch n take the place of.
  bool credited(const State& s, int a, int n) const {
    int wanted = n - p_.depth;
    if (p_.fault == Fault::kCreditTooOld) wanted -= 1;
    if (p_.fault == Fault::kCreditTooNew) wanted = n;
    for (int r = 0; r < p_.ranks; ++r) {
      if (r != a && p_.fault != Fault::kNoCredits && s.credit[a][r] < wanted) return false;
    }
    return true;
  }

  bool post_entry(State& s, int a, int n, uint8_t& heads) {
    const int half = n % p_.depth;
    const int r = peer(a, heads / 2);
    const bool first = heads++ % 2 == 0;
    if (first && p_.fault != Fault::kRecordsLast) store_records(s, a, r, n);
    if (first == (p_.fault == Fault::kHeadFirst)) {
      s.head[half][r][a] = static_cast<uint8_t>(n);
      s.entry[half][r][a][kOperation] = content(a, n, kOperation);
    } else {
      for (const Word word : {kWidth, kPlan}) s.entry[half][r][a][word] = content(a, n, word);
    }
    const bool wanted_entry = p_.fault == Fault::kNone && reading(s, r) <= n - p_.depth;
    expect(!wanted_entry, "an entry is overwritten that its reader needs");
    return true;
  }

  bool store(State& s, int a, int n, uint8_t& stored) {
    const int half = n % p_.depth;
    if (p_.fault == Fault::kReadThenStore && s.rank[a].read < 2 * (p_.ranks - 1)) return false;
    const Op op = p_.ops[n - 1];
    const int kind = messages(op), r = peer(a, stored / 2);
    const bool reaches = stores_direct(op, r);
    // Its entry tells where the rows lie.
    if (reaches && p_.fault != Fault::kAnyAddress && s.head[half][a][r] != n) return false;
    uint8_t& cell = reaches ? s.rows[r][a] : s.memory[kind][half][r][place(op, a)];
    uint8_t& ready = s.ready[kind][half][r][a];
    const bool begins = stored++ % 2 == 0;
    if (begins && p_.fault == Fault::kRecordsLast) store_records(s, a, r, n);
    if (!sends(op, a, r) || pulls(op, a)) return true;
    if (reaches) expect(in_operation(s, r, n), "a row is stored where no operation is");
    cell = static_cast<uint8_t>(begins ? n | kTorn : n);
    if (begins == (p_.fault == Fault::kFlagFirst)) ready = static_cast<uint8_t>(n);
    return true;
  }

  bool has_late_records(int n) const { return p_.late_records && p_.ops[n - 1] == Op::kEarlyRows; }
  // Those of the messages of epoch n - 1, from a for r.
  void store_records(State& s, int a, int r, int n) {
    if (has_late_records(n)) s.records[(n - 1) % p_.depth][r][a] = static_cast<uint8_t>(n - 1);
  }

  bool read(State& s, int a, int n, int half) {
    State::Rank& me = s.rank[a];
    const Op op = p_.ops[n - 1];
    const int kind = messages(op), i = me.read / 2;
    // Sums are taken over the ranks ascending, copies as they come.
    const bool sums = op == Op::kFromHot || op == Op::kToken || op == Op::kPull;
    const int from = sums ? (i < a ? i : i + 1) : peer(a, i);
    const int ready = s.ready[kind][half][a][from];
    if (me.read % 2 == 0) {
      const bool entered = s.head[half][a][from] == n;
      const bool meets = sends(op, from, a) || p_.fault != Fault::kMeetsSenders;
      if (meets && entered && !agrees(s, a, from, n, half)) {
        name_difference();
        return true;
      }
      if (meets && !entered) return false;
    }
    if (has_late_records(n)) {
      expect(s.records[(n - 1) % p_.depth][a][from] == n - 1, "a record is read that is not there");
    }
    if (pulls(op, from)) {
      expect(in_operation(s, from, n), "a row is read that its owner has back");
    } else if (sends(op, from, a)) {
      if (ready < n && p_.fault != Fault::kNoReady) return false;
      expect(ready <= n, "a flag is newer than its epoch");
      const uint8_t* const cell =
          stores_direct(op, a) ? &s.rows[a][from] : &s.memory[kind][half][a][place(op, from)];
      expect(*cell == n, "an overwritten row is read");
    }
    const bool ends = me.read++ % 2 == 1;
    if (ends && p_.fault == Fault::kCreditPerSender) s.credit[from][a] = static_cast<uint8_t>(n);
    return true;
  }

  bool post_credit(State& s, int a, int n) {
    State::Rank& me = s.rank[a];
    const int peers = p_.ranks - 1;
    const bool waits = pulls(p_.ops[n - 1], a) && p_.fault != Fault::kEndsAtOnce;
    if (me.credits < peers) {
      if (p_.fault != Fault::kCreditPerSender) {
        s.credit[peer(a, me.credits)][a] = static_cast<uint8_t>(n);
      }
      ++me.credits;
      if (me.credits == peers && waits) return true;
    } else {
      for (int r = 0; r < p_.ranks; ++r) {
        if (r != a && s.credit[a][r] < n) return false;
      }
    }
    if (me.credits == peers && me.read == 2 * peers) {
      const bool astray = p_.stray.rank >= 0 && n == p_.stray.epoch;
      expect(!astray, "an operation ends among ranks that differ");
      me = {.done = static_cast<uint8_t>(n),
            .heads = me.next_heads,
            .stored = me.next_stored,
            .read = 0,
            .credits = 0,
            .next_heads = 0,
            .next_stored = 0};
    }
    return true;
  }

  Protocol p_;
  std::string error_;
  bool named_ = false;  // by the step that was taken last
  std::vector<State> open_;
  std::unordered_set<uint64_t> seen_;
};

// Mixtures of four operations, every `stride`-th of all.
std::vector<std::vector<Op>> mixtures(int stride) {
  std::vector<std::vector<Op>> out;
  for (int i = 0; i < kOps * kOps * kOps * kOps; i += stride) {
    auto& ops = out.emplace_back();
    for (int rest = i, j = 0; j < 4; ++j, rest /= kOps) ops.push_back(static_cast<Op>(rest % kOps));
  }
  return out;
}

size_t expect_ok(int ranks, int depth, int stride) {
  size_t states = 0;
  for (const auto& ops : mixtures(stride)) {
    Explorer explorer({ranks, depth, ops});
    EXPECT_EQ(explorer.run(), "ok") << int(ops[0]) << int(ops[1]) << int(ops[2]) << int(ops[3]);
    states += explorer.states();
  }
  return states;
}

TEST(Explorer, TwoRanks) {
  for (const int depth : {1, 2}) EXPECT_GT(expect_ok(2, depth, 1), 100000u);
}

TEST(Explorer, ThreeRanks) {
  for (const int depth : {1, 2}) EXPECT_GT(expect_ok(3, depth, 89), 100000u);
}

TEST(Explorer, EntriesMayBeToldBehindTheRows) {
  for (const int depth : {1, 2}) {
    for (const auto& ops : mixtures(1)) {
      Explorer explorer({.ranks = 2, .depth = depth, .ops = ops, .late_entries = true});
      EXPECT_EQ(explorer.run(), "ok") << int(ops[0]) << int(ops[1]) << int(ops[2]) << int(ops[3]);
    }
    for (const auto& ops : mixtures(149)) {
      Explorer explorer({.ranks = 3, .depth = depth, .ops = ops, .late_entries = true});
      EXPECT_EQ(explorer.run(), "ok") << int(ops[0]) << int(ops[1]) << int(ops[2]) << int(ops[3]);
    }
  }
}

TEST(Explorer, FindsWhatMissingEdgesBreak) {
  const std::string overwritten = "an overwritten row is read";
  for (const int ranks : {2, 3}) {
    for (const int depth : {1, 2}) {
      const auto explore = [&](Fault fault) {
        const std::vector<Op> ops{Op::kCopy, Op::kToHot, Op::kCopy, Op::kPrepare};
        return Explorer({ranks, depth, ops, fault}).run();
      };
      EXPECT_EQ(explore(Fault::kNone), "ok");
      // With two halves, that of epoch n - 2 is free once all peers are in n - 1, which is known.
      for (const Fault fault : {Fault::kNoCredits, Fault::kCreditTooOld, Fault::kCreditUnread}) {
        EXPECT_EQ(explore(fault) == "ok", depth == 2);
      }
      EXPECT_EQ(explore(Fault::kNoReady), overwritten);
      EXPECT_EQ(explore(Fault::kFlagFirst), overwritten);
      EXPECT_EQ(explore(Fault::kCreditTooNew), "deadlock");
      EXPECT_EQ(explore(Fault::kReadThenStore), "deadlock");
      EXPECT_EQ(explore(Fault::kHeadFirst), "ranks that agree are told apart");
    }
  }
}

// All interleavings of an operation in which one rank runs something else end with its name.
TEST(Explorer, AStrayRankIsNamed) {
  constexpr Fault kRemoved[] = {Fault::kAnyOperation, Fault::kAnyWidth, Fault::kAnyPlan};
  const std::string ends = "an operation ends among ranks that differ";
  for (const int ranks : {2, 3}) {
    for (const int depth : {1, 2}) {
      for (const Op op :
           {Op::kCopy, Op::kToHot, Op::kFromHot, Op::kToken, Op::kDirect, Op::kPull}) {
        for (int stray = 0; stray < ranks; ++stray) {
          for (const Word word : {kOperation, kWidth, kPlan}) {
            const auto explore = [&](Fault fault) {
              const std::vector<Op> ops{Op::kPrepare, Op::kCopy, op, Op::kCopy};
              return Explorer({ranks, depth, ops, fault, {stray, 3, word}}).run();
            };
            EXPECT_EQ(explore(Fault::kNone), "ok");
            EXPECT_EQ(explore(kRemoved[word]), ends);
            if (op == Op::kToHot) {
              EXPECT_EQ(explore(Fault::kMeetsSenders), ends);
            }
          }
        }
      }
    }
  }
}

TEST(Explorer, DirectRowsNeedTheirOwnersEntryAndTheReadersEnd) {
  for (const int ranks : {2, 3}) {
    for (const int depth : {1, 2}) {
      const auto explore = [&](Fault fault) {
        const std::vector<Op> ops{Op::kDirect, Op::kPull, Op::kCopy, Op::kDirect};
        return Explorer({ranks, depth, ops, fault}).run();
      };
      EXPECT_EQ(explore(Fault::kNone), "ok");
      EXPECT_EQ(explore(Fault::kAnyAddress), "a row is stored where no operation is");
      EXPECT_EQ(explore(Fault::kEndsAtOnce), "a row is read that its owner has back");
    }
  }
}

TEST(Explorer, RowsMayComeBeforeTheMessages) {
  const std::vector<Op> between{Op::kCopy, Op::kEarly, Op::kEarlyRows, Op::kToHot},
      twice{Op::kEarly, Op::kEarlyRows, Op::kEarly, Op::kEarlyRows};
  for (const int ranks : {2, 3}) {
    for (const auto& ops : {between, twice}) {
      EXPECT_EQ(Explorer({ranks, 1, ops}).run(), "deadlock");
      EXPECT_EQ(Explorer({ranks, 2, ops}).run(), "ok");
      EXPECT_EQ(Explorer({ranks, 3, ops}).run(), "ok");
      EXPECT_EQ(Explorer({.ranks = ranks, .depth = 2, .ops = ops, .late_entries = true}).run(),
                "ok");
    }
    // Here meeting does not imply the credits.
    EXPECT_NE(Explorer({ranks, 2, between, Fault::kNoCredits}).run(), "ok");
  }
}

TEST(Explorer, RecordsMayComeWithTheEntryOfEarlyRows) {
  const std::vector<Op> between{Op::kCopy, Op::kEarly, Op::kEarlyRows, Op::kToHot},
      twice{Op::kEarly, Op::kEarlyRows, Op::kEarly, Op::kEarlyRows};
  for (const int ranks : {2, 3}) {
    for (const int depth : {2, 3}) {
      for (const auto& ops : {between, twice}) {
        const auto explore = [&](Fault fault, bool late_entries) {
          return Explorer({.ranks = ranks,
                           .depth = depth,
                           .ops = ops,
                           .fault = fault,
                           .late_entries = late_entries,
                           .late_records = true})
              .run();
        };
        EXPECT_EQ(explore(Fault::kNone, false), "ok");
        EXPECT_EQ(explore(Fault::kNone, true), "ok");
        EXPECT_EQ(explore(Fault::kRecordsLast, false), "a record is read that is not there");
      }
    }
  }
}

// kToken lays the rows of all senders out anew: so a credit must speak for all of them.
TEST(Explorer, ACreditOfOneSenderIsNotEnough) {
  const std::vector<Op> ops{Op::kToHot, Op::kToken, Op::kToHot, Op::kPrepare};
  EXPECT_EQ(Explorer({3, 1, ops, Fault::kCreditPerSender}).run(), "an overwritten row is read");
}

}  // namespace
}  // namespace moiety::moe
