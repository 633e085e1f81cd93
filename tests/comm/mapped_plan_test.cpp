// The steps of operations among ranks on GPUs, carried out on a CPU: their results, and whether
// every two accesses of a byte that conflict have a meeting between them.
#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>

#include <gtest/gtest.h>

#include "moiety/base/error.h"
#include "moiety/comm/mapped/plan.h"
#include "moiety/comm/reduce.h"
#include "tests/comm/conformance.h"

namespace moiety::comm::mapped {
namespace {

using conformance::value;

// Which ranks' meetings a rank knows of, by rank.
using Clock = std::vector<int64_t>;

struct Access {
  const std::byte *begin, *end;
  int rank;
  int64_t time;  // of the rank
  bool write;
};

// Carries out the steps of all ranks, and keeps who touched what, when.
class Machine {
 public:
  explicit Machine(int ranks)
      : ranks_(ranks),
        clocks_(ranks, Clock(ranks)),
        counts_(ranks, std::vector<uint64_t>(ranks)),
        pushed_(ranks, std::vector<std::map<int, std::vector<std::byte>>>(ranks)) {}

  std::vector<std::string> races;

  // Runs the steps in an order that `random` chooses. `skipped` leaves out that meeting of a rank's
  // list; a small operation, which cannot work without, stays.
  void run(const std::vector<std::vector<Step>>& steps, const CollectiveCall& shape,
           std::mt19937& random, int skipped = -1) {
    std::vector<size_t> next(ranks_);
    std::vector<int> meetings(ranks_);
    std::vector<bool> posted(ranks_);
    for (int idle = 0; idle < 1000;) {
      std::vector<int> order;
      for (int r = 0; r < ranks_; ++r) {
        if (next[r] < steps[r].size()) order.push_back(r);
      }
      if (order.empty()) return;
      const int r = order[random() % order.size()];
      const Step& step = steps[r][next[r]];
      ++idle;
      if (step.kind == Step::Kind::kMeet && meetings[r] == skipped) {
        ++meetings[r], ++next[r];
        continue;
      }
      if (step.kind == Step::Kind::kMeet || step.kind == Step::Kind::kSmall) {
        if (!posted[r]) post(r, step), posted[r] = true, idle = 0;
        if (!met(r, step)) continue;
        posted[r] = false;
        if (step.kind == Step::Kind::kMeet) ++meetings[r];
        if (step.kind == Step::Kind::kSmall) finish_small(r, step.small, shape);
      } else {
        carry_out(r, step, shape);
      }
      ++next[r];
      idle = 0;
    }
    FAIL() << "the ranks wait for each other for ever";
  }

 private:
  void touch(int rank, const std::byte* begin, int64_t bytes, bool write) {
    if (bytes == 0) return;
    const Access now{begin, begin + bytes, rank, ++clocks_[rank][rank], write};
    for (const Access& before : accesses_) {
      if (before.rank == rank || !(before.write || write)) continue;
      if (before.begin >= now.end || now.begin >= before.end) continue;
      if (clocks_[rank][before.rank] < before.time) {
        races.push_back(text("ranks {} and {}", before.rank, rank));
      }
    }
    accesses_.push_back(now);
  }

  void post(int r, const Step& step) {
    ++clocks_[r][r];
    for (int peer = 0; peer < ranks_; ++peer) {
      if (!(step.peers >> peer & 1)) continue;
      const uint64_t count = ++counts_[r][peer];
      posts_[{r, peer, count}] = clocks_[r];
      if (step.kind != Step::Kind::kSmall) continue;
      const SmallStep::Peer& to = step.small.peers[peer];
      touch(r, to.send, to.send_bytes, false);
      pushed_[peer][r][parity(count)] = {to.send, to.send + to.send_bytes};
    }
  }

  bool met(int r, const Step& step) {
    for (int peer = 0; peer < ranks_; ++peer) {
      if ((step.peers >> peer & 1) && !posts_.count({peer, r, counts_[r][peer]})) return false;
    }
    for (int peer = 0; peer < ranks_; ++peer) {
      if (!(step.peers >> peer & 1)) continue;
      const Clock& theirs = posts_[{peer, r, counts_[r][peer]}];
      for (int i = 0; i < ranks_; ++i) clocks_[r][i] = std::max(clocks_[r][i], theirs[i]);
    }
    return true;
  }

  void carry_out(int r, const Step& step, const CollectiveCall& shape) {
    if (step.kind == Step::Kind::kCopy) {
      for (int64_t row = 0; row < step.copy.rows; ++row) {
        std::byte* to = step.copy.to + row * step.copy.to_pitch;
        const std::byte* from = step.copy.from + row * step.copy.from_pitch;
        touch(r, from, step.copy.bytes, false);
        touch(r, to, step.copy.bytes, true);
        std::memmove(to, from, size_t(step.copy.bytes));
      }
    } else {
      add(r, step.sum.to, step.sum.sources, step.sum.elements, shape);
      const int64_t bytes = byte_size(shape.dtype, step.sum.elements);
      for (std::byte* to : step.sum.also) {
        touch(r, to, bytes, true);
        std::memcpy(to, step.sum.to, size_t(bytes));
      }
    }
  }

  void add(int r, std::byte* to, const std::vector<const std::byte*>& sources, int64_t elements,
           const CollectiveCall& shape) {
    const int64_t bytes = byte_size(shape.dtype, elements);
    for (const std::byte* source : sources) touch(r, source, bytes, false);
    touch(r, to, bytes, true);
    const std::vector<const void*> plain(sources.begin(), sources.end());
    reduce(to, plain, elements, shape.dtype, shape.op);
  }

  void finish_small(int r, const SmallStep& step, const CollectiveCall& shape) {
    std::vector<const std::byte*> sources;
    for (int peer = 0; peer < ranks_; ++peer) {
      const std::vector<std::byte>& got = pushed_[r][peer][parity(counts_[r][peer])];
      const SmallStep::Peer& from = step.peers[peer];
      if (step.sum) {
        sources.push_back(peer == r ? from.send : got.data());
      } else if (peer != r && from.recv_bytes > 0) {
        ASSERT_EQ(got.size(), size_t(from.recv_bytes));
        touch(r, from.recv, from.recv_bytes, true);
        std::memcpy(from.recv, got.data(), got.size());
      }
    }
    if (step.sum) add(r, step.sum, sources, step.elements, shape);
  }

  const int ranks_;
  std::vector<Clock> clocks_;
  std::vector<std::vector<uint64_t>> counts_;
  std::map<std::tuple<int, int, uint64_t>, Clock> posts_;
  std::vector<std::vector<std::map<int, std::vector<std::byte>>>> pushed_;
  std::deque<Access> accesses_;
};

// Memory of all ranks and the operations that they run on it.
struct World {
  int ranks;
  Places places;
  std::vector<std::vector<std::byte>> memory;
  std::vector<std::byte*> at;

  World(int ranks, bool beside_compute, int64_t half, int64_t small) : ranks(ranks) {
    places = places_of(ranks, {.staging_bytes = 1 << 20, .beside_compute = beside_compute});
    places.half = half;  // so that little data makes many chunks
    places.small = small;
    for (int r = 0; r < ranks; ++r) memory.emplace_back(places.bytes, std::byte{0xEE});
    for (auto& one : memory) at.push_back(one.data());
  }

  std::vector<std::vector<Step>> steps(const std::vector<CollectiveCall>& calls,
                                       const std::vector<Direct>& direct) const {
    std::vector<std::vector<Step>> out;
    for (int r = 0; r < ranks; ++r) {
      out.push_back(plan(calls[r], {.rank = r,
                                    .memory = at,
                                    .places = places,
                                    .direct = direct.empty() ? nullptr : &direct[r]}));
    }
    return out;
  }
};

struct Case {
  Collective kind;
  int64_t n;
  bool direct, in_place;
};

// The numbers that an operation has written; it may have none and no memory for them.
std::vector<float> received(const CollectiveCall& call, size_t count) {
  const auto* got = reinterpret_cast<const float*>(call.recv);
  return {got, got + count};
}

// One operation on every rank, with what each rank's output must be.
struct Operation {
  std::vector<std::vector<float>> send, recv, expected;
  std::vector<CollectiveCall> calls;
  std::vector<Direct> direct;

  Operation(const Case& c, int ranks, uint64_t salt) {
    const auto fill = [&](int r, int64_t n) {
      std::vector<float> out(n);
      for (int64_t i = 0; i < n; ++i) out[i] = value<float>(r, i, salt);
      return out;
    };
    const auto all = [&](int64_t first, int64_t n) {
      std::vector<float> out;
      for (int64_t i = first; i < first + n; ++i) {
        out.push_back(conformance::reduced<float>(ranks, i, ReduceOp::kSum, salt));
      }
      return out;
    };
    const int64_t n = c.n;
    send.resize(ranks), recv.resize(ranks), expected.resize(ranks);
    for (int r = 0; r < ranks; ++r) {
      if (c.kind == Collective::kAllReduce) {
        send[r] = fill(r, n);
        expected[r] = all(0, n);
      } else if (c.kind == Collective::kReduceScatter) {
        send[r] = fill(r, ranks * n);
        recv[r].resize(n);
        expected[r] = all(r * n, n);
      } else if (c.kind == Collective::kBroadcast) {
        send[r] = fill(r, n);
        expected[r] = fill(ranks - 1, n);
      } else if (c.kind == Collective::kAllGather) {
        send[r] = fill(r, n);
        recv[r].resize(ranks * n);
        for (int p = 0; p < ranks; ++p) {
          for (int64_t i = 0; i < n; ++i) expected[r].push_back(value<float>(p, i, salt));
        }
      }
    }
    for (int r = 0; r < ranks; ++r) add_call(c, r, ranks);
    if (!c.direct) return;
    for (int r = 0; r < ranks; ++r) {
      Direct d{.place = 1, .at = {}};
      for (const CollectiveCall& call : calls) d.at.push_back(const_cast<std::byte*>(call.send));
      direct.push_back(d);
    }
  }

  void add_call(const Case& c, int r, int ranks) {
    const auto view = [](float* data, int64_t n) { return TensorView(data, DType::kFloat32, {n}); };
    const int64_t n = c.n;
    if (c.kind == Collective::kAllReduce) {
      calls.push_back(all_reduce_call(view(send[r].data(), n), ReduceOp::kSum));
    } else if (c.kind == Collective::kBroadcast) {
      calls.push_back(broadcast_call(ranks, view(send[r].data(), n), ranks - 1));
    } else if (c.kind == Collective::kReduceScatter) {
      float* to = c.in_place ? send[r].data() + r * n : recv[r].data();
      calls.push_back(
          reduce_scatter_call(ranks, view(send[r].data(), ranks * n), view(to, n), ReduceOp::kSum));
    } else {
      float* from = c.in_place ? recv[r].data() + r * n : send[r].data();
      if (c.in_place) std::copy(send[r].begin(), send[r].end(), from);
      calls.push_back(all_gather_call(ranks, view(from, n), view(recv[r].data(), ranks * n)));
    }
  }

  void check(int r) const {
    EXPECT_EQ(received(calls[r], expected[r].size()), expected[r]) << "rank " << r;
  }
};

// The caller of rank r writes the input of the operation anew, and uses its output.
std::vector<std::vector<Step>> write_inputs(const Operation& operation, int ranks) {
  std::vector<std::vector<Step>> out(ranks);
  for (int r = 0; r < ranks; ++r) {
    auto* x = const_cast<std::byte*>(operation.calls[r].send);
    out[r].push_back({.kind = Step::Kind::kSum, .sum = {x, {x}, operation.calls[r].elements}});
    std::byte* got = operation.calls[r].recv;
    const int64_t parts = operation.calls[r].kind == Collective::kAllGather ? ranks : 1;
    out[r].push_back(
        {.kind = Step::Kind::kSum, .sum = {got, {got}, parts * operation.calls[r].elements}});
  }
  return out;
}

std::vector<Case> cases() {
  std::vector<Case> out;
  for (const Collective kind : {Collective::kAllReduce, Collective::kReduceScatter,
                                Collective::kAllGather, Collective::kBroadcast}) {
    for (const int64_t n : {0, 3, 500, 2001, 3001, 5003}) {
      for (const bool direct : {false, true}) {
        for (const bool in_place : {false, true}) out.push_back({kind, n, direct, in_place});
      }
    }
  }
  return out;
}

TEST(MappedPlan, EveryOperationHasItsResultAndNoRace) {
  std::mt19937 random(1);
  for (const int ranks : {2, 3, 5}) {
    for (const bool beside : {false, true}) {
      Machine machine(ranks);
      World world(ranks, beside, 8192, 256);
      std::vector<std::unique_ptr<Operation>> operations;  // their memory stays, for the accesses
      uint64_t salt = 0;
      for (const Case& c : cases()) {
        SCOPED_TRACE(text("{} of {} elements among {} ranks, direct {}, in place {}, beside {}",
                          name(c.kind), c.n, ranks, c.direct, c.in_place, beside));
        operations.push_back(std::make_unique<Operation>(c, ranks, ++salt));
        Operation& operation = *operations.back();
        machine.run(world.steps(operation.calls, operation.direct), operation.calls[0], random);
        for (int r = 0; r < ranks; ++r) operation.check(r);
        ASSERT_TRUE(machine.races.empty()) << machine.races[0];
      }
    }
  }
}

// Without any one of its meetings an operation that is repeated on the same tensors has a race.
TEST(MappedPlan, EveryMeetingIsNeeded) {
  std::mt19937 random(2);
  for (const Case& c : cases()) {
    if (c.n < 500 || (c.kind == Collective::kBroadcast && c.in_place)) continue;
    const int ranks = 3;
    World world(ranks, false, 8192, 256);
    Operation operation(c, ranks, 1);
    const auto steps = world.steps(operation.calls, operation.direct);
    const auto meetings = std::count_if(steps[0].begin(), steps[0].end(),
                                        [](const Step& s) { return s.kind == Step::Kind::kMeet; });
    ASSERT_GE(meetings, 1);
    for (int skipped = 0; skipped < meetings; ++skipped) {
      Machine machine(ranks);
      // The last meeting keeps the next operation from writing what peers still read; three rounds,
      // in which halves of the staging come round.
      for (int round = 0; round < 3; ++round) {
        machine.run(steps, operation.calls[0], random, skipped);
        machine.run(write_inputs(operation, ranks), operation.calls[0], random);
      }
      EXPECT_FALSE(machine.races.empty())
          << name(c.kind) << " of " << c.n << ", direct " << c.direct << ": meeting " << skipped
          << " of " << meetings << " can be left out";
    }
  }
}

TEST(MappedPlan, RowsOfAllToAllOfAnySize) {
  std::mt19937 random(3);
  for (const int ranks : {2, 3, 5}) {
    World world(ranks, false, 8192, 256);
    Machine machine(ranks);
    std::deque<std::vector<float>> kept;
    for (int round = 0; round < 20; ++round) {
      const int64_t width = round % 3 == 0 ? 1 : 7;
      std::vector<std::vector<int64_t>> rows(ranks, std::vector<int64_t>(ranks));
      for (auto& line : rows) {
        for (int64_t& n : line) n = random() % 4 == 0 ? random() % 900 : random() % 5;
      }
      std::vector<CollectiveCall> calls;
      std::vector<std::vector<float>> expected(ranks);
      for (int r = 0; r < ranks; ++r) {
        std::vector<int64_t> in;
        std::vector<float> send;
        for (int p = 0; p < ranks; ++p) {
          in.push_back(rows[p][r]);
          for (int64_t i = 0; i < rows[r][p] * width; ++i)
            send.push_back(float(1e6 * r + 1e4 * p + double(i)));
          for (int64_t i = 0; i < rows[p][r] * width; ++i) {
            expected[r].push_back(float(1e6 * p + 1e4 * r + double(i)));
          }
        }
        auto& from = kept.emplace_back(std::move(send));
        auto& to = kept.emplace_back(expected[r].size());
        const auto view = [&](std::vector<float>& x) {
          return TensorView(x.data(), DType::kFloat32, {int64_t(x.size()) / width, width});
        };
        calls.push_back(all_to_all_call(ranks, view(from), rows[r], view(to), in));
      }
      machine.run(world.steps(calls, {}), calls[0], random);
      ASSERT_TRUE(machine.races.empty()) << machine.races[0];
      for (int r = 0; r < ranks; ++r) {
        EXPECT_EQ(received(calls[r], expected[r].size()), expected[r]) << "rank " << r;
      }
    }
  }
}

// The words of two ranks that meet again and again, in every order of their stores and looks: a word
// is never overwritten before the peer has seen it, and nobody waits for ever.
TEST(MappedPlan, WordsOfTwoRanksInEveryOrder) {
  constexpr int kMeetings = 6;
  struct State {
    uint64_t word[2][2] = {};  // [reader][parity]
    int stored[2] = {}, seen[2] = {};
    auto operator<=>(const State&) const = default;
  };
  std::set<State> known;
  std::vector<State> open{State{}};
  bool finished = false;
  while (!open.empty()) {
    const State s = open.back();
    open.pop_back();
    if (!known.insert(s).second) continue;
    int moves = 0;
    for (int r = 0; r < 2; ++r) {
      State t = s;
      if (s.stored[r] == s.seen[r]) {
        if (s.stored[r] == kMeetings) continue;
        uint64_t& place = t.word[1 - r][parity(++t.stored[r])];
        EXPECT_LE(count_of(place), uint64_t(s.seen[1 - r])) << "an unseen word is overwritten";
        place = make_word(t.stored[r], 7);
      } else {
        const uint64_t word = s.word[r][parity(s.stored[r])];
        if (count_of(word) != uint64_t(s.stored[r])) continue;
        ++t.seen[r];
      }
      ++moves;
      open.push_back(t);
    }
    const bool end = s.seen[0] == kMeetings && s.seen[1] == kMeetings;
    finished |= end;
    EXPECT_TRUE(moves > 0 || end);
  }
  EXPECT_TRUE(finished);
}

}  // namespace
}  // namespace moiety::comm::mapped
