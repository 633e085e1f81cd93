// Operations among GPU ranks, run on the host by the bodies of their kernels: the conformance
// suite, whatever the number of blocks and warps, orders of operations, growth, faults.
#include "moiety/moe/gpu_exchange.h"
#include "tests/moe/early_run.h"
#include "tests/moe/ep_conformance.h"
#include "tests/moe/ep_quantized.h"
#include "tests/moe/ep_row_map.h"
#include "tests/moe/host_team.h"

namespace moiety::moe {
namespace {

// The place of a suite whose operations run as steps.
class OnSteps : public OnHost {
 public:
  explicit OnSteps(const HostShape& shape) : shape_(shape) {}
  void enter(EpGroup& group, comm::Communicator& world) const {
    run_as_steps(group, world, shape_);
  }

 private:
  HostShape shape_;
};

template <class T, class Out>
void run_case(const conformance::Case& c, int seed, EpTransport transport) {
  const conformance::Problem<T> problem(c, seed);
  const conformance::Expected<T, Out> expected(problem);
  Threads::run(c.ranks, [&](comm::Communicator& world) {
    SCOPED_TRACE(text("rank {} of case {}: {}", world.rank(), seed, c.describe()));
    const HostShape shape{.warps = 1 + (seed + world.rank()) % 3,
                          .blocks = 1 + seed % 5 + world.rank(),
                          .seed = static_cast<unsigned>(seed + world.rank())};
    conformance::RankRun<T, Out, OnSteps>(world, problem, expected, transport, OnSteps(shape))
        .run();
  });
}
template <class T>
void run_case_of(const conformance::Case& c, int seed, EpTransport transport) {
  c.out_fp32 ? run_case<T, float>(c, seed, transport) : run_case<T, T>(c, seed, transport);
}
void run_any(conformance::Case c, int seed, EpTransport transport) {
  conformance::shrink(c);
  if (c.dtype == DType::kBFloat16) run_case_of<bf16>(c, seed, transport);
  if (c.dtype == DType::kFloat16) run_case_of<fp16>(c, seed, transport);
  if (c.dtype == DType::kFloat32) run_case_of<float>(c, seed, transport);
}

// A part of the cases.
class PeersCases : public testing::TestWithParam<int> {
 public:
  static constexpr int kParts = 8;
};
INSTANTIATE_TEST_SUITE_P(Part, PeersCases, testing::Range(0, PeersCases::kParts));

TEST_P(PeersCases, HaveTheBitsOfTheOracle) {
  std::vector<conformance::Case> cases = conformance::all_cases();
  std::erase_if(cases, [](const conformance::Case& c) { return c.ranks == 1; });
  const size_t step = kSanitized ? 4 * kParts : kParts;
  for (size_t i = GetParam(); i < cases.size() && !HasFailure(); i += step) {
    run_any(cases[i], static_cast<int>(i), EpTransport::kMapped);
  }
}

TEST_P(PeersCases, HaveTheBitsOfTheOracleOverCollectives) {
  std::vector<conformance::Case> cases = conformance::all_cases();
  std::erase_if(cases, [](const conformance::Case& c) { return c.ranks == 1; });
  const size_t step = (kSanitized ? 8 : 2) * kParts;
  for (size_t i = GetParam(); i < cases.size() && !HasFailure(); i += step) {
    run_any(cases[i], static_cast<int>(i), EpTransport::kCollectives);
  }
}

TEST(Peers, MoveQuantizedRows) {
  std::vector<quantized::Case> cases = quantized::all_cases();
  std::erase_if(cases, [](const quantized::Case& c) { return c.ranks == 1; });
  for (size_t i = 0; i < cases.size() && !HasFailure(); ++i) {
    quantized::Case& c = cases[i];
    if (c.swizzled()) c.experts = std::min(c.experts, 6);  // each has 128 rows or none
    conformance::shrink(c);
    const quantized::Problem problem(c, static_cast<int>(i));
    const auto transport = i % 3 == 0 ? EpTransport::kCollectives : EpTransport::kMapped;
    Threads::run(c.ranks, [&](comm::Communicator& world) {
      SCOPED_TRACE(text("rank {} of case {}: {}", world.rank(), i, c.describe()));
      quantized::run_rank(world, problem, transport, OnSteps({}));
    });
  }
}

TEST(Peers, BringRowsOnceByAMap) {
  for (const row_map::Sizes& z : row_map::kSizes) {
    Threads::run(z.ranks, [&](comm::Communicator& world) {
      SCOPED_TRACE(text("{} ranks, {} slots", z.ranks, z.capacity));
      OnHost place;
      row_map::run_rank(world, z, {.chunk_rows = 4}, place,
                        [&](EpGroup& group) { run_as_steps(group, world, {}); });
    });
  }
}

constexpr int kRanks = 3, kModel = 24;
const ExpertMap kMap(6, kRanks);
constexpr EpLimits kLimits{.tokens = 300, .model = 2 * kModel, .topk = 2};
Batch batch_of(int seed, int64_t model = kModel) { return {kMap, {300, 0, 17}, 2, 4, model, seed}; }
EpOptions options(double deadline = 30) {
  return {.name = "moe", .deadline = Seconds(deadline), .chunk_rows = 4};
}

// Several plans at a time, in an order that is not that of a stack; rows of one operation overtake
// those who still read the one before.
TEST(Peers, PlansMayBeUsedInAnyOrderUnderDelays) {
  const Batch batches[] = {batch_of(1), batch_of(2), batch_of(3)};
  for (const int depth : {1, 2, 3}) {
    Threads::run(kRanks, [&](comm::Communicator& world) {
      EpLimits limits = kLimits;
      limits.depth = depth;
      EpOptions with = options();
      with.comm_sms = depth - 1;  // whatever the number of blocks that push
      EpGroup group = EpGroup::create(world, kMap, limits, with);
      std::mt19937 random(depth * kRanks + world.rank());
      HostShape shape;
      shape.blocks = 6 * depth;
      shape.before = [&random](const char*) {
        if (random() % 3 > 0) return;
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
      };
      run_as_steps(group, world, shape);
      std::vector<BatchRun> runs;
      for (const Batch& batch : batches) runs.emplace_back(batch, world.rank());
      for (int round = 0; round < 5; ++round) {
        runs[0].forward(group);
        runs[1].forward(group);
        runs[0].backward(group);
        runs[2].forward(group);
        runs[1].backward(group);
        runs[2].backward(group);
      }
      for (BatchRun& run : runs) run.expect_all("in flight");
      group.check();
      group.close();
    });
  }
}

// prepare and dispatch in one: rows that turn out dead, ranks without tokens, limits of rows, more
// experts than a numbering of 1024 threads holds, and operations before and behind.
TEST(Peers, RowsMayComeBeforeCountsAreKnown) {
  int seed = 0;
  for (const int ranks : {2, 3, 5}) {
    for (const int experts : {7, 1500}) {
      for (const int topk : {1, 3, 8}) {
        const ExpertMap map(experts, ranks);
        std::vector<int64_t> tokens(static_cast<size_t>(ranks), 40);
        tokens[1] = ++seed % 2 == 0 ? 0 : 256;
        const Batch batch(map, tokens, topk, 4, 72, seed);
        std::vector<int64_t> capacity = batch.capacity;
        for (int64_t& c : capacity) c = c / (seed % 3 + 1);
        const EpLimits limits{.tokens = 256, .model = 72, .topk = topk, .depth = 2 + seed % 2};
        Threads::run(ranks, [&](comm::Communicator& world) {
          SCOPED_TRACE(text("rank {} of {}, {} experts, K {}", world.rank(), ranks, experts, topk));
          EpGroup group =
              EpGroup::create(world, map, limits, {.name = "moe", .chunk_rows = 1 + seed % 5});
          HostExchange& exchange =
              run_as_steps(group, world,
                           {.warps = 1 + seed % 3, .blocks = 1 + seed % 4, .seed = unsigned(seed)});
          EXPECT_TRUE(exchange.takes_early());
          BatchRun whole(batch, world.rank());
          EarlyRun<> early(batch, world.rank(), capacity), again(batch, world.rank(), capacity);
          early.run(group, OverflowPolicy::kDrop, {});
          whole.forward(group);
          again.run(group, OverflowPolicy::kDrop, {});
          whole.backward(group);
          early.expect("first");
          again.expect("second");
          whole.expect_all("between");
          EXPECT_EQ(exchange.control().epoch, group.epoch());
          group.check(group.epoch());
          group.close();
        });
      }
    }
  }
}

TEST(PeersFault, PrepareDispatchBesideTheTwoCalls) {
  EpLimits limits = kLimits;
  limits.tokens = 20;
  const Batch few(kMap, {20, 0, 17}, 2, 4, kModel, 5);
  std::string said[kRanks];
  Threads::run(kRanks, [&](comm::Communicator& world) {
    EpGroup group = EpGroup::create(world, kMap, limits, options());
    run_as_steps(group, world, {});
    BatchRun run(few, world.rank());
    EarlyRun<> early(few, world.rank(), few.capacity);
    const std::string thrown = error_of([&] {
      if (world.rank() == 1) {
        run.prepare_plan(group);
        run.dispatch_rows(group);
      } else {
        early.run(group);
      }
    });
    said[world.rank()] = error_of([&] { group.check(); });
    world.barrier();
    group.close();
  });
  for (const std::string& text : said) {
    EXPECT_NE(text.find("runs prepare_dispatch"), std::string::npos) << text;
    EXPECT_NE((text + ",").find("rank 1 runs prepare,"), std::string::npos) << text;
  }
}

// Steps are given the address of one Control; plans and epochs outlive the memory.
TEST(Peers, GrowingKeepsPlans) {
  const Batch batch = batch_of(4);
  Threads::run(kRanks, [&](comm::Communicator& world) {
    EpGroup group = EpGroup::create(world, kMap, kLimits, options());
    HostExchange& exchange = run_as_steps(group, world, {});
    BatchRun run(batch, world.rank());
    run.forward(group);
    EpLimits larger = kLimits;
    larger.tokens *= 2;
    larger.depth = 3;
    exchange.allocate(larger);
    EXPECT_EQ(exchange.control().epoch, 3);
    EXPECT_EQ(exchange.control().depth, 3);
    run.dispatch_rows(group);
    run.combine_rows(group);
    run.backward(group);
    run.expect_all("after growth");
    EXPECT_EQ(exchange.control().epoch, 7);
    group.close();
  });
}

// Rank 0 comes late. What others wait for it counts, unless something runs beside their operation;
// then from where that has come to its end.
TEST(Peers, WaitsBesideOtherWorkDoNotCount) {
  constexpr auto kLate = std::chrono::milliseconds(800);
  const Batch batch = batch_of(5);
  Threads::run(kRanks, [&](comm::Communicator& world) {
    EpGroup group = EpGroup::create(world, kMap, kLimits, options());
    HostExchange& exchange = run_as_steps(group, world, {});
    BatchRun run(batch, world.rank());
    run.prepare_plan(group);
    const auto waited_ms = [&](bool beside, bool ended) {
      const int64_t before = *exchange.waited_ns();
      world.barrier();
      if (beside) begin_beside(group, {});
      if (ended) end_beside(group, {});
      if (world.rank() == 0) std::this_thread::sleep_for(kLate);
      run.dispatch_rows(group);
      if (beside && !ended) end_beside(group, {});
      run.combine_rows(group);
      return 1e-6 * static_cast<double>(*exchange.waited_ns() - before);
    };
    const double alone = waited_ms(false, false), hidden = waited_ms(true, false),
                 ended = waited_ms(true, true);
    if (world.rank() != 0) {
      EXPECT_GT(alone, 600);
      EXPECT_LT(hidden, 400);
      EXPECT_GT(ended, 600);
    }
    world.barrier();
    group.close();
  });
}

// -- Faults. An operation does not throw; what comes behind it does, on every rank.

struct Outcome {
  std::string text[kRanks];
};
using Act = std::function<void(int, EpGroup&, HostExchange&, BatchRun&)>;
Outcome fail_with(const Act& act, double deadline = 20, int depth = 2,
                  EpTransport transport = EpTransport::kMapped) {
  const Batch batch = batch_of(5);
  Outcome out;
  Threads::run(kRanks, [&](comm::Communicator& world) {
    const int me = world.rank();
    EpLimits limits = kLimits;
    limits.depth = depth;
    EpOptions how = options(deadline);
    how.transport = transport;
    EpGroup group = EpGroup::create(world, kMap, limits, how);
    HostExchange& exchange = run_as_steps(group, world, {});
    BatchRun run(batch, me);
    run.prepare_plan(group);
    world.barrier();
    act(me, group, exchange, run);
    out.text[me] = error_of([&] { group.check(); });
    world.barrier();
    // What is enqueued behind a fault does nothing, and ends.
    Mat<int64_t> idx(batch.plan.in.idx[me], 2);
    exchange.prepare(run.plan, {.idx_TK = idx.view()}, 9, {});
    EXPECT_EQ(error_of([&] { run.dispatch_rows(group); }), error_of([&] { group.check(); }));
    world.barrier();
    group.close();

    EpGroup fresh = EpGroup::create(world, kMap, kLimits, options());
    run_as_steps(fresh, world, {});
    BatchRun second(batch, me);
    second.forward(fresh);
    second.backward(fresh);
    second.expect_all("after a fault");
    fresh.close();
  });
  return out;
}

// Rank 2 stays away: each other rank says what(rank) it waited for, or who stopped it.
void expect_late(const Outcome& out, const std::string& operation,
                 const std::function<std::string(int)>& what) {
  bool named = false;
  for (int r = 0; r < 2; ++r) {
    const bool mine = out.text[r] == text(
                                         "ep {}, group \"moe\", epoch 2: rank {} waited 0.3 s for "
                                         "rank 2, {}; rank 2 last seen in prepare, 1",
                                         operation, r, what(r));
    named = named || mine;
    EXPECT_TRUE(mine || out.text[r] == text("ep, group \"moe\", epoch 2: stopped by rank {}, which "
                                            "waited for rank 2",
                                            1 - r))
        << out.text[r];
  }
  EXPECT_TRUE(named);
}

TEST(PeersFault, ARankThatNeverArrives) {
  expect_late(fail_with(
                  [](int rank, EpGroup& group, HostExchange&, BatchRun& run) {
                    if (rank != 2) run.dispatch_rows(group);
                  },
                  0.3),
              "dispatch", [](int rank) {
                const size_t rows = batch_of(5).plan.rank[rank].token[2].size();
                return text("chunk 1 of {} (word at 0)", (rows + 3) / 4);
              });
  expect_late(fail_with(
                  [](int rank, EpGroup& group, HostExchange&, BatchRun& run) {
                    if (rank != 2) run.prepare_plan(group);
                  },
                  0.3),
              "prepare", [](int) { return "its routing (word at 0)"; });
  // With one half the next operation needs the credit of the one before.
  expect_late(fail_with(
                  [](int rank, EpGroup& group, HostExchange& exchange, BatchRun& run) {
                    if (rank == 2) return;
                    const peers::Control c = exchange.control();
                    *c.word(rank, c.layout.credit, 2) = 0;
                    run.dispatch_rows(group);
                  },
                  0.3, 1),
              "dispatch", [](int) { return "credit 1 (word at 0)"; });
}

// Rank `stray` runs `its`, the others `ours`: every rank names two that differ.
void expect_mismatch(const Outcome& out, int stray, const std::string& ours,
                     const std::string& its) {
  for (const std::string& said : out.text) {
    bool named = false;
    for (int r = 0; r < kRanks; ++r) {
      const std::string where = "ep, group \"moe\", epoch 2: ";
      named = named ||
              said == where + text("rank {} runs {}, rank {} runs {}", r, ours, stray, its) ||
              said == where + text("rank {} runs {}, rank {} runs {}", stray, its, r, ours);
    }
    EXPECT_TRUE(named) << said;
  }
}

TEST(PeersFault, ARankThatRunsSomethingElse) {
  expect_mismatch(fail_with([](int rank, EpGroup& group, HostExchange&, BatchRun& run) {
                    rank == 1 ? run.combine_rows(group) : run.dispatch_rows(group);
                  }),
                  1, "dispatch(bf16, 48 B) of plan 1", "combine(bf16, 48 B, kRank) of plan 1");
  expect_mismatch(fail_with([](int rank, EpGroup& group, HostExchange&, BatchRun& run) {
                    rank == 2 ? run.prepare_plan(group) : run.dispatch_rows(group);
                  }),
                  2, "dispatch(bf16, 48 B) of plan 1", "prepare");
  const Batch wide = batch_of(5, 2 * kModel);
  expect_mismatch(fail_with([&](int rank, EpGroup& group, HostExchange&, BatchRun& run) {
                    BatchRun other(wide, rank);
                    other.plan = run.plan;
                    (rank == 2 ? other : run).dispatch_rows(group);
                  }),
                  2, "dispatch(bf16, 48 B) of plan 1", "dispatch(bf16, 96 B) of plan 1");
  expect_mismatch(fail_with([&](int rank, EpGroup& group, HostExchange&, BatchRun& run) {
                    if (rank == 0) run.plan.epoch = 7;
                    run.dispatch_rows(group);
                  }),
                  0, "dispatch(bf16, 48 B) of plan 1", "dispatch(bf16, 48 B) of plan 7");
}

// Over collectives every rank finds it by itself.
TEST(PeersFault, ARankThatRunsSomethingElseOverCollectives) {
  const Outcome out = fail_with(
      [](int rank, EpGroup& group, HostExchange&, BatchRun& run) {
        rank == 1 ? run.combine_backward_rows(group) : run.dispatch_rows(group);
      },
      20, 2, EpTransport::kCollectives);
  for (const std::string& said : out.text) {
    EXPECT_NE(said.find("runs combine_backward(bf16, 48 B) of plan 1"), std::string::npos) << said;
  }
}

void expect_prepare_differs(const std::function<void(int, PrepareArgs&)>& change,
                            const std::string& difference) {
  const Tensor idx(DType::kInt32, {5, 1});
  const Outcome out = fail_with([&](int rank, EpGroup& group, HostExchange&, BatchRun&) {
    PrepareArgs args{.idx_TK = idx, .capacity = 10 + rank};
    change(rank, args);
    const PlanMemory memory(kMap, kLimits, args);
    prepare(group, args, memory.view(), {});
  });
  int named = 0;
  for (const std::string& said : out.text) {
    const bool mine = said == "ep prepare, group \"moe\", epoch 2: " + difference;
    named += mine;
    EXPECT_TRUE(mine || said.find("whose prepare differs from that of rank") != std::string::npos)
        << said;
  }
  EXPECT_GT(named, 0);
}

TEST(PeersFault, PreparesThatDiffer) {
  const Tensor wide(DType::kInt32, {5, 2});
  expect_prepare_differs(
      [&](int rank, PrepareArgs& args) {
        if (rank == 2) args.idx_TK = wide;
      },
      "K differs: rank 0 has 1, rank 2 has 2");
  expect_prepare_differs([](int rank, PrepareArgs& args) { args.alignment = rank == 0 ? 4 : 16; },
                         "alignment differs: rank 0 has 4, rank 1 has 16");
  expect_prepare_differs(
      [](int rank, PrepareArgs& args) {
        args.overflow = rank == 1 ? OverflowPolicy::kDrop : OverflowPolicy::kReport;
      },
      "overflow policy differs: rank 0 has kReport, rank 1 has kDrop");
}

TEST(PeersFault, AFlagOfALaterEpoch) {
  const Outcome out =
      fail_with([](int rank, EpGroup& group, HostExchange& exchange, BatchRun& run) {
        peers::Control c = exchange.control();
        c.begin_epoch();
        if (rank == 1) peers::store_release(c.ready_word(1, 2, 0), 9ull << kSignatureBits);
        // Rank 2 stays away, so that its own flag does not take the place of that one.
        while (rank == 2 && peers::load_acquire(c.poison(2)) == 0) std::this_thread::yield();
        run.dispatch_rows(group);
      });
  EXPECT_EQ(out.text[1],
            "ep dispatch, group \"moe\", epoch 2: rank 1 sees a flag of rank 2 of epoch 9");
}

TEST(PeersFault, AnAbortEndsWaits) {
  const Outcome out =
      fail_with([](int rank, EpGroup& group, HostExchange& exchange, BatchRun& run) {
        // As the host does when it hears that a peer stopped.
        const std::jthread host([&] {
          std::this_thread::sleep_for(std::chrono::milliseconds(100));
          peers::store_release(&exchange.machine().page()->abort, 1);
        });
        if (rank != 2) run.dispatch_rows(group);
      });
  for (const int r : {0, 1}) {
    EXPECT_EQ(out.text[r], text("ep dispatch, group \"moe\", epoch 2: rank {} stopped: a peer "
                                "stopped",
                                r));
  }
}

// A graph may still be launched when its group has let go of its memory.
TEST(PeersFault, AnOperationWithoutMemory) {
  Threads::run(kRanks, [&](comm::Communicator& world) {
    EpGroup group = EpGroup::create(world, kMap, kLimits, options());
    HostExchange& exchange = run_as_steps(group, world, {});
    const Batch batch = batch_of(6);
    BatchRun run(batch, world.rank());
    run.forward(group);
    exchange.release();
    run.dispatch_rows(group);
    EXPECT_EQ(error_of([&] { group.check(); }),
              "ep dispatch, group \"moe\": released, reserve it first");
    group.close();
  });
}

// -- Which rank looks after what: pure functions.

// Two ranks share a GPU with what else waits there.
TEST(PeersFault, MoreBlocksWaitThanThereIsRoomFor) {
  const comm::WaitingBlocks sums({}, "comm \"dp\"", 3), other({}, "group \"mtp\"", 96);
  const comm::WaitingBlocks elsewhere({DeviceType::kCuda, 7}, "group \"far\"", 1000);
  Threads::run(2, [&](comm::Communicator& world) {
    // Few tokens may be taken early, with more blocks that wait.
    for (const auto& [tokens, blocks] : {std::pair(300, 2), std::pair(8, 28)}) {
      EpGroup group =
          EpGroup::create(world, {4, 2}, {.tokens = tokens, .model = 8, .topk = 1}, {"moe"});
      const int enough = 8 + 3 + 96 + blocks;
      run_as_steps(group, world, {.multiprocessors = enough});
      world.barrier();
      group.impl()->peers.reset();
      world.barrier();
      EXPECT_EQ(
          error_of([&] { run_as_steps(group, world, {.multiprocessors = enough - 1}); }),
          text("ep, group \"moe\": {} blocks of this group, 3 of comm \"dp\" and 96 of group "
               "\"mtp\" may wait at once, but this GPU has {} SMs less 8; close some, or take "
               "more GPUs",
               blocks, enough - 1));
      group.close();
    }
  });
}

TEST(PeersIndices, EveryChunkIsTakenOnceAndPeersTakeTurns) {
  for (const int ranks : {2, 3, 8, 64}) {
    for (int me = 0; me < ranks; me += 5) {
      std::vector<std::vector<int>> seen(ranks, std::vector<int>(7));
      for (int64_t i = 0; i < 7 * (ranks - 1); ++i) {
        const peers::ChunkTask task = peers::chunk_task(i, me, ranks);
        ASSERT_NE(task.peer, me);
        ++seen[task.peer][task.chunk];
        EXPECT_EQ(task.peer, (me + 1 + i % (ranks - 1)) % ranks);
      }
      for (int r = 0; r < ranks; ++r) {
        EXPECT_EQ(seen[r], std::vector<int>(7, r != me)) << me << " of " << ranks;
      }
    }
  }
}

TEST(PeersIndices, ARowIsInTheFirstBlockThatEndsBehindIt) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    std::vector<int64_t> end(random() % 9);
    int64_t rows = 0;
    for (int64_t& e : end) e = rows += random() % 4;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t b =
          peers::block_of_row(std::ssize(end), row, [&](int64_t i) { return end[i]; });
      EXPECT_GT(end[b], row);
      EXPECT_TRUE(b == 0 || end[b - 1] <= row);
    }
  }
}

TEST(PeersBytes, AreThoseOfTheSharedMemory) {
  EpOptions gpu = options();
  gpu.device = {DeviceType::kCuda, 0};
  for (const int ranks : {2, 3, 64}) {
    const ExpertMap map(128, ranks);
    const EpLimits limits{.tokens = 4096, .model = 7168, .topk = 8};
    const EpBytes bytes = EpGroup::bytes(map, limits, gpu);
    const EpBytes cpu = EpGroup::bytes(map, limits, options());
    EXPECT_EQ(bytes.regions, cpu.regions);
    EXPECT_EQ(bytes.meta, cpu.meta);
    EXPECT_EQ(bytes.words, cpu.words);
    EXPECT_EQ(bytes.total, bytes.regions + bytes.meta + bytes.words + bytes.loss);
    EXPECT_EQ((bytes.total + 8 * ranks) % comm::kGpuMemoryUnit, 0);
    EXPECT_LT(bytes.loss, comm::kGpuMemoryUnit);
  }
  const ExpertMap map(8, 2);
  EXPECT_LT(
      EpGroup::bytes(map, {.tokens = 99, .model = 9999, .topk = 1, .staged = false}, gpu).regions,
      EpGroup::bytes(map, {.tokens = 99, .model = 9999, .topk = 1}, gpu).regions / 20);
  gpu.transport = EpTransport::kCollectives;
  EpLimits limits{.tokens = 100, .model = 24, .topk = 2};
  const EpBytes bytes = EpGroup::bytes(map, limits, gpu);
  EXPECT_EQ(bytes.regions, 2 * 100 * 128);  // what comes, and the boxes
  EXPECT_EQ(bytes.total, bytes.regions + bytes.meta + bytes.words + bytes.loss);
  limits.token_order = true;  // two records a row, which hold a number, too
  EXPECT_EQ(EpGroup::bytes(map, limits, gpu).regions, 2 * 100 * 2 * 128);
}

}  // namespace
}  // namespace moiety::moe
