// Ranks that are late, gone, or do something else: an exact message on every living rank, in time;
// and that delays alone change nothing.
#include <chrono>
#include <thread>

#include "moiety/base/parallel.h"
#include "moiety/comm/flags.h"
#include "tests/moe/ep_batch.h"

namespace moiety::moe {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRanks = 3, kModel = 20;
const ExpertMap kMap(6, kRanks);
constexpr EpLimits kLimits{.tokens = 12, .model = 2 * kModel, .topk = 2};
constexpr double kDeadline = 0.5;

EpOptions options(double deadline = kDeadline) {
  return {.name = "moe", .deadline = Seconds(deadline), .chunk_rows = 4};
}
Batch small_batch(int64_t model = kModel) { return {kMap, {12, 12, 12}, 2, 1, model, 1}; }

// The words of a run's ranks, and the time that each took.
struct Outcome {
  std::vector<std::string> text;
  std::vector<double> seconds;
};

// act(rank, group, run) on every rank, after a prepare of all. Then nobody but close may do
// anything, and a new group of the same communicator works.
Outcome fail_with(const std::function<void(int, EpGroup&, BatchRun&)>& act,
                  double deadline = kDeadline) {
  const Batch batch = small_batch();
  Outcome out{std::vector<std::string>(kRanks), std::vector<double>(kRanks)};
  Threads::run(kRanks, [&](comm::Communicator& world) {
    const int me = world.rank();
    EpGroup group = EpGroup::create(world, kMap, kLimits, options(deadline));
    BatchRun run(batch, me);
    run.prepare_plan(group);
    const auto start = Clock::now();
    out.text[me] = error_of([&] { act(me, group, run); });
    out.seconds[me] = Seconds(Clock::now() - start).count();
    world.barrier();

    const auto poisoned = Clock::now();
    const std::string again = error_of([&] { group.check(); });
    EXPECT_NE(again, "no error");
    if (out.text[me] != "no error") {
      EXPECT_EQ(again, out.text[me]);
    } else {
      out.text[me] = again;
    }
    EXPECT_EQ(error_of([&] { run.backward(group); }), again);
    EXPECT_EQ(error_of([&] { group.reserve(kLimits); }), again);
    EXPECT_LT(Seconds(Clock::now() - poisoned).count(), std::max(deadline, 2.0));
    group.close();

    EpGroup fresh = EpGroup::create(world, kMap, kLimits, options(30));
    BatchRun second(batch, me);
    second.forward(fresh);
    second.backward(fresh);
    second.expect_all("after failure");
    fresh.close();
  });
  return out;
}

// Every rank either says one of `exact` for it, or was stopped by a rank that did.
void expect_outcome(const Outcome& out, const std::vector<std::vector<std::string>>& exact,
                    const std::string& epoch, const std::string& verb) {
  bool named = false;
  for (int r = 0; r < kRanks; ++r) {
    bool found = false;
    for (const std::string& text : exact[r]) found = found || text == out.text[r];
    named = named || found;
    for (int origin = 0; origin < kRanks; ++origin) {
      for (int about = 0; about < kRanks; ++about) {
        found =
            found || out.text[r] == text(
                                        "ep, group \"moe\", epoch {}: stopped by rank {}, which "
                                        "{} rank {}",
                                        epoch, origin, verb, about);
      }
    }
    EXPECT_TRUE(found) << "rank " << r << ": " << out.text[r];
    EXPECT_LT(out.seconds[r], kDeadline + 1);
  }
  EXPECT_TRUE(named);
}

TEST(EpFailure, ARankThatNeverArrives) {
  const Outcome out = fail_with([](int rank, EpGroup& group, BatchRun& run) {
    if (rank != 2) run.dispatch_rows(group);
  });
  const Batch batch = small_batch();
  const auto message = [&](int rank) {
    const size_t rows = batch.plan.rank[rank].token[2].size();
    return text(
        "ep dispatch, group \"moe\", epoch 2: rank {} waited 0.5 s for rank 2, chunk 1 of {} "
        "(word at 0); rank 2 last seen in prepare, 1",
        rank, (rows + 3) / 4);
  };
  expect_outcome(out, {{message(0)}, {message(1)}, {}}, "2", "waited for");
  EXPECT_GE(std::max(out.seconds[0], out.seconds[1]), kDeadline);
}

TEST(EpFailure, ARankThatNeverRoutes) {
  const Outcome out = fail_with([](int rank, EpGroup& group, BatchRun& run) {
    if (rank != 0) run.prepare_plan(group);
  });
  const auto message = [](int rank) {
    return text(
        "ep prepare, group \"moe\", epoch 2: rank {} waited 0.5 s for rank 0, its routing "
        "(word at 0); rank 0 last seen in prepare, 1",
        rank);
  };
  expect_outcome(out, {{}, {message(1)}, {message(2)}}, "2", "waited for");
}

// Rank 1 stops before it ends an operation: its credit is what is missing in the next.
TEST(EpFailure, ARankThatNeverEnds) {
  const Batch batch(kMap, {12, 12, 12}, 2, 1, kModel, 1);
  std::vector<std::string> texts(kRanks);
  Threads::run(kRanks, [&](comm::Communicator& world) {
    const int me = world.rank();
    EpLimits limits = kLimits;
    limits.depth = 1;
    EpGroup group = EpGroup::create(world, kMap, limits, options());
    BatchRun run(batch, me);
    run.prepare_plan(group);
    world.barrier();
    // The state is as if the credit for epoch 1 had not come.
    MappedExchange& e = mapped(group);
    if (me != 1) e.word(me, e.layout().credit, 1) = 0;
    if (me != 1) texts[me] = error_of([&] { run.dispatch_rows(group); });
    world.barrier();
    group.close();
  });
  const auto message = [](int rank) {
    return text(
        "ep dispatch, group \"moe\", epoch 2: rank {} waited 0.5 s for rank 1, credit 1 "
        "(word at 0); rank 1 last seen in prepare, 1",
        rank);
  };
  EXPECT_TRUE(texts[0] == message(0) || texts[2] == message(2)) << texts[0] << "\n" << texts[2];
}

// Rank `stray` runs `its`, the others `ours`: every rank names two that differ.
void expect_mismatch(const Outcome& out, int stray, const std::string& ours,
                     const std::string& its) {
  for (const std::string& said : out.text) {
    bool named = false;
    for (int r = 0; r < kRanks; ++r) {
      if (r == stray) continue;
      const std::string where = "ep, group \"moe\", epoch 2: ";
      named = named ||
              said == where + text("rank {} runs {}, rank {} runs {}", r, ours, stray, its) ||
              said == where + text("rank {} runs {}, rank {} runs {}", stray, its, r, ours);
    }
    EXPECT_TRUE(named) << said;
  }
}

TEST(EpFailure, AnotherOperation) {
  const Outcome out = fail_with(
      [](int rank, EpGroup& group, BatchRun& run) {
        rank == 1 ? run.combine_rows(group) : run.dispatch_rows(group);
      },
      20);
  expect_mismatch(out, 1, "dispatch(bf16, 40 B) of plan 1", "combine(bf16, 40 B, kRank) of plan 1");
}

TEST(EpFailure, APrepareAmongOthers) {
  const Outcome out = fail_with(
      [](int rank, EpGroup& group, BatchRun& run) {
        rank == 2 ? run.prepare_plan(group) : run.dispatch_rows(group);
      },
      20);
  expect_mismatch(out, 2, "dispatch(bf16, 40 B) of plan 1", "prepare");
}

TEST(EpFailure, AnotherModelSize) {
  const Batch wide = small_batch(2 * kModel);
  const Outcome out = fail_with(
      [&](int rank, EpGroup& group, BatchRun& run) {
        BatchRun other(wide, rank);
        other.plan = run.plan;
        (rank == 2 ? other : run).dispatch_rows(group);
      },
      20);
  expect_mismatch(out, 2, "dispatch(bf16, 40 B) of plan 1", "dispatch(bf16, 80 B) of plan 1");
}

// A disagreement between prepare's heads is known to all ranks at once.
void expect_prepare_differs(const std::function<void(int, PrepareArgs&)>& change,
                            const std::string& difference) {
  const Tensor idx(DType::kInt32, {5, 1});
  const Outcome out = fail_with(
      [&](int rank, EpGroup& group, BatchRun&) {
        PrepareArgs args{.idx_TK = idx, .capacity = 10 + rank};
        change(rank, args);
        const PlanMemory memory(kMap, kLimits, args);
        prepare(group, args, memory.view(), {});
      },
      20);
  const std::string message = "ep prepare, group \"moe\", epoch 2: " + difference;
  for (int r = 0; r < kRanks; ++r) {
    const bool stopped =
        out.text[r].find("whose prepare differs from that of rank") != std::string::npos;
    EXPECT_TRUE(out.text[r] == message || stopped) << out.text[r];
  }
  EXPECT_TRUE(out.text[0] == message || out.text[1] == message || out.text[2] == message);
}

TEST(EpFailure, AnotherPrepare) {
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

TEST(EpFailure, AFlagOfALaterEpoch) {
  const Outcome out = fail_with(
      [](int rank, EpGroup& group, BatchRun& run) {
        MappedExchange& e = mapped(group);
        if (rank == 1) {  // as if rank 2 had run ahead
          const int64_t flags = e.layout().chunks + 1;
          comm::store_release(e.word(1, e.layout().ready, (0 * kRanks + 2) * flags), 9ull << 20);
        }
        // Rank 2 itself stays away, so that its own flag does not take the place of that one.
        while (rank == 2) {
          group.check();
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        run.dispatch_rows(group);
      },
      20);
  EXPECT_EQ(out.text[1],
            "ep dispatch, group \"moe\", epoch 2: rank 1 sees a flag of rank 2 of epoch 9");
}

// A rank that fails elsewhere takes its peers out of their waits, long before the deadline.
TEST(EpFailure, ARankThatDies) {
  const Batch batch = small_batch();
  std::vector<std::string> texts(kRanks);
  const auto start = Clock::now();
  EXPECT_EQ(error_of([&] {
              Threads::run(kRanks, [&](comm::Communicator& world) {
                const int me = world.rank();
                EpGroup group = EpGroup::create(world, kMap, kLimits, options(60));
                BatchRun run(batch, me);
                run.prepare_plan(group);
                if (me == 1) fail(ErrorKind::kIo, "the disk is full");
                texts[me] = error_of([&] { run.dispatch_rows(group); });
              });
            }),
            "the disk is full");
  EXPECT_LT(Seconds(Clock::now() - start).count(), 2);
  for (const int r : {0, 2}) {
    EXPECT_EQ(texts[r], text("ep dispatch, group \"moe\", epoch 2: rank {} stopped: "
                             "rank 1 failed: the disk is full",
                             r));
  }
}

// Random delays before everything that is stored for a peer.
TEST(EpDelays, ChangeNothing) {
  const Batch batch = small_batch();
  for (const int depth : {1, 2}) {
    for (int seed = 0; seed < 4; ++seed) {
      Threads::run(kRanks, [&](comm::Communicator& world) {
        const int me = world.rank();
        EpLimits limits = kLimits;
        limits.depth = depth;
        std::mt19937 rng(seed * kRanks + me);
        EpOptions delayed = options(30);
        delayed.chunk_rows = 1;
        delayed.before_store = [&rng] {
          if (rng() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(rng() % 300));
        };
        EpGroup group = EpGroup::create(world, kMap, limits, delayed);
        set_thread_budget(1);  // the delays are not made for several threads
        std::vector<BatchRun> runs;
        for (int i = 0; i < 3; ++i) {
          runs.emplace_back(batch, me);
          runs.back().forward(group);
        }
        for (BatchRun& run : runs) {
          run.backward(group);
          run.expect_all("delayed");
        }
        group.close();
      });
    }
  }
}

// One rank comes late to each operation in turn.
TEST(EpDelays, ALateRankIsWaitedFor) {
  const Batch batch = small_batch();
  Threads::run(kRanks, [&](comm::Communicator& world) {
    EpGroup group = EpGroup::create(world, kMap, kLimits, options(30));
    BatchRun run(batch, world.rank());
    const auto late = [&](int who) {
      if (world.rank() == who) std::this_thread::sleep_for(std::chrono::milliseconds(150));
    };
    late(1);
    run.prepare_plan(group);
    late(2);
    run.dispatch_rows(group);
    late(0);
    run.combine_rows(group);
    late(1);
    run.backward(group);
    run.expect_all("late");
    group.close();
  });
}

}  // namespace
}  // namespace moiety::moe
