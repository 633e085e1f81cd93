// Failures over collectives: ranks that are late, gone, or do something else are named exactly as
// between ranks that map each other's memory (ep_failure_test.cpp).
#include <chrono>
#include <thread>

#include "moiety/base/parallel.h"
#include "tests/moe/ep_batch.h"

namespace moiety::moe {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRanks = 3, kModel = 20;
const ExpertMap kMap(6, kRanks);
constexpr EpLimits kLimits{.tokens = 12, .model = 2 * kModel, .topk = 2, .token_order = true};
const EpOptions kOptions{.name = "moe", .transport = EpTransport::kCollectives};

Batch small_batch(int64_t model = kModel, int seed = 1) {
  return {kMap, {12, 12, 12}, 2, 1, model, seed};
}

struct Outcome {
  std::vector<std::string> text;
  std::vector<double> seconds;
};

// act(rank, group, run) on every rank, after a prepare of all; it fails everywhere. Then nobody but
// close may do anything, and a new group of the same communicator works.
Outcome fail_with(const std::function<void(int, EpGroup&, BatchRun&)>& act, double deadline = 30) {
  const Batch batch = small_batch();
  Outcome out{std::vector<std::string>(kRanks), std::vector<double>(kRanks)};
  const auto body = [&](comm::Communicator& world) {
    const int me = world.rank();
    EpGroup group = EpGroup::create(world, kMap, kLimits, kOptions);
    BatchRun run(batch, me);
    run.prepare_plan(group);
    const auto start = Clock::now();
    out.text[me] = error_of([&] { act(me, group, run); });
    out.seconds[me] = Seconds(Clock::now() - start).count();
    world.barrier();

    EXPECT_EQ(error_of([&] { group.check(); }), out.text[me]);
    EXPECT_EQ(error_of([&] { run.backward(group); }), out.text[me]);
    EXPECT_EQ(error_of([&] { group.reserve(kLimits); }), out.text[me]);
    group.close();

    EpGroup fresh = EpGroup::create(world, kMap, kLimits, kOptions);
    BatchRun second(batch, me);
    second.forward(fresh);
    second.backward(fresh);
    second.expect_all("after failure");
    fresh.close();
  };
  Threads::run(kRanks, body, Seconds(deadline));
  return out;
}

// Checks the words of all ranks about rank `late`, whichever gives up first.
void expect_late(const Outcome& out, int late, const std::string& begin, const std::string& end) {
  for (int r = 0; r < kRanks; ++r) {
    bool found = false;
    for (int waited = 0; waited < kRanks; ++waited) {
      const std::string text = begin + moiety::text("rank {}", waited) + end;
      found = found || (waited != late && out.text[r] == text);
    }
    EXPECT_TRUE(found) << "rank " << r << ": " << out.text[r];
  }
}

TEST(EpCollectiveFailure, ARankThatComesTooLate) {
  constexpr double kDeadline = 2;
  const Outcome out = fail_with(
      [](int rank, EpGroup& group, BatchRun& run) {
        if (rank == 2) std::this_thread::sleep_for(Seconds(kDeadline + 0.3));
        run.dispatch_rows(group);
      },
      kDeadline);
  expect_late(out, 2, "ep dispatch, group \"moe\", epoch 2: communicator \"moe\", operation 4: ",
              " waited 2.0 s in all_to_all(uint8[32]) for rank 2; last together in prepare, 1");
  for (const int r : {0, 1}) {
    EXPECT_GE(out.seconds[r], kDeadline - 0.1);
    EXPECT_LT(out.seconds[r], kDeadline + 1);
  }
}

std::string runs(int me, const std::string& mine, int peer, const std::string& its) {
  return text("ep, group \"moe\", epoch 2: rank {} runs {}, rank {} runs {}", me, mine, peer, its);
}

TEST(EpCollectiveFailure, AnotherOperation) {
  const Outcome out = fail_with([](int rank, EpGroup& group, BatchRun& run) {
    rank == 1 ? run.combine_rows(group) : run.dispatch_rows(group);
  });
  const char *copies = "dispatch(bf16, 40 B) of plan 1",
             *sums = "combine(bf16, 40 B, kRank) of plan 1";
  EXPECT_EQ(out.text[0], runs(0, copies, 1, sums));
  EXPECT_EQ(out.text[1], runs(1, sums, 0, copies));
  EXPECT_EQ(out.text[2], runs(2, copies, 1, sums));
}

TEST(EpCollectiveFailure, APrepareAmongOthers) {
  const Outcome out = fail_with([](int rank, EpGroup& group, BatchRun& run) {
    rank == 2 ? run.prepare_plan(group) : run.dispatch_rows(group);
  });
  EXPECT_EQ(out.text[0], runs(0, "dispatch(bf16, 40 B) of plan 1", 2, "prepare"));
  EXPECT_EQ(out.text[2], runs(2, "prepare", 0, "dispatch(bf16, 40 B) of plan 1"));
}

TEST(EpCollectiveFailure, AnotherModelSize) {
  const Batch wide = small_batch(2 * kModel);
  const Outcome out = fail_with([&](int rank, EpGroup& group, BatchRun& run) {
    BatchRun other(wide, rank);
    other.plan = run.plan;
    (rank == 2 ? other : run).dispatch_rows(group);
  });
  EXPECT_EQ(out.text[0],
            runs(0, "dispatch(bf16, 40 B) of plan 1", 2, "dispatch(bf16, 80 B) of plan 1"));
  EXPECT_EQ(out.text[1],
            runs(1, "dispatch(bf16, 40 B) of plan 1", 2, "dispatch(bf16, 80 B) of plan 1"));
  EXPECT_EQ(out.text[2],
            runs(2, "dispatch(bf16, 80 B) of plan 1", 0, "dispatch(bf16, 40 B) of plan 1"));
}

TEST(EpCollectiveFailure, AnotherPrepare) {
  const Tensor idx(DType::kInt32, {5, 1});
  const Outcome out = fail_with([&](int rank, EpGroup& group, BatchRun&) {
    const PrepareArgs args{.idx_TK = idx, .alignment = rank == 1 ? 4 : 16, .capacity = 10};
    const PlanMemory memory(kMap, kLimits, args);
    prepare(group, args, memory.view(), {});
  });
  for (const std::string& text : out.text) {
    EXPECT_EQ(text,
              "ep prepare, group \"moe\", epoch 2: alignment differs: rank 0 has 16, rank 1 has 4");
  }
}

TEST(EpCollectiveFailure, ARankThatDies) {
  const Batch batch = small_batch();
  std::vector<std::string> texts(kRanks);
  const auto start = Clock::now();
  EXPECT_EQ(error_of([&] {
              Threads::run(kRanks, [&](comm::Communicator& world) {
                const int me = world.rank();
                EpGroup group = EpGroup::create(world, kMap, kLimits, kOptions);
                BatchRun run(batch, me);
                run.prepare_plan(group);
                if (me == 1) fail(ErrorKind::kIo, "the disk is full");
                texts[me] = error_of([&] { run.dispatch_rows(group); });
              });
            }),
            "the disk is full");
  EXPECT_LT(Seconds(Clock::now() - start).count(), 2);
  for (const int r : {0, 2}) {
    EXPECT_EQ(texts[r],
              "ep dispatch, group \"moe\", epoch 2: communicator \"moe\", operation 4: "
              "all_to_all(uint8[32]) stopped: rank 1 failed: the disk is full; last together in "
              "prepare, 1");
  }
}

// Random delays before everything that goes to a peer.
TEST(EpCollectiveDelays, ChangeNothing) {
  const Batch batch = small_batch();
  Threads::run(kRanks, [&](comm::Communicator& world) {
    const int me = world.rank();
    std::mt19937 rng(me);
    EpOptions delayed = kOptions;
    delayed.before_store = [&rng] {
      if (rng() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(rng() % 300));
    };
    set_thread_budget(1);  // the delays are not made for several threads
    EpGroup group = EpGroup::create(world, kMap, kLimits, delayed);
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

// Groups whose ranks cannot map each other find that out.
TEST(EpTransport, IsChosenByWhatTheRanksCan) {
  for (const bool map_memory : {true, false}) {
    comm::run_thread_ranks(2, {.map_memory = map_memory}, [&](comm::Communicator& world) {
      EpGroup group = EpGroup::create(world, ExpertMap(4, 2), kLimits, {});
      EXPECT_EQ(group.transport(), map_memory ? EpTransport::kMapped : EpTransport::kCollectives);
      group.close();
    });
  }
}

// More ranks than words could be laid out for: each with one expert, each sending to all others.
TEST(EpTransport, ManyRanksOverCollectives) {
  constexpr int kMany = 70;
  const ExpertMap map(kMany, kMany);
  std::vector<int64_t> tokens(kMany, 2);
  std::mt19937 rng(1);
  const auto idx = make_routing(Routing::kRandom, tokens, 32, map, rng);
  const ref::Plan plan = ref::make_plan({map, 32, 1, std::vector<int64_t>(kMany, 200), idx},
                                        std::vector<int64_t>(kMany, 200));
  Threads::run(kMany, [&](comm::Communicator& world) {
    const EpLimits limits{.tokens = 2, .model = 3, .topk = 32};
    const EpOptions mapped{.name = "moe", .transport = EpTransport::kMapped};
    EXPECT_EQ(error_of([&] { EpGroup::create(world, map, limits, mapped); }),
              "ep, group \"moe\": ranks 70 is outside [1, 64]");
    EpGroup group = EpGroup::create(world, map, limits, kOptions);
    const int me = world.rank();
    Mat<int64_t> mine(idx[me], 32);
    const PrepareArgs args{.idx_TK = mine.view(), .capacity = 200};
    const PlanMemory memory(map, limits, args);
    const EpPlan made = prepare(group, args, memory.view(), {});
    expect_plan(made, plan, me);
    // Sums of ones are exact: every token comes back 32 times.
    Mat<float> x(std::vector<float>(6, 1.0f), 3), rows(200, 3), out(2, 3);
    const EpLimits wide{.tokens = 2, .model = 3, .topk = 32, .widest = PayloadFormat::kFP32};
    group.reserve(wide);
    dispatch(group, made, {.x_TD = x.view(), .rows_CD = rows.view()}, {});
    combine(group, made, {.y_CD = rows.view(), .out_TD = out.view()}, {});
    out.expect(std::vector<float>(6, 32.0f), false, "out");
    group.close();
  });
}

}  // namespace
}  // namespace moiety::moe
