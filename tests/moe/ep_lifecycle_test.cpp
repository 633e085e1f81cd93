// Several plans in flight, several groups, growth and release of memory, the end of a group.
#include <cstdio>

#include "moiety/moe/exchange.h"
#include "tests/moe/ep_batch.h"

namespace moiety::moe {
namespace {

constexpr int kRanks = 3, kModel = 33;
const ExpertMap kMap({1, 0, 2, 1, 1, 0, 2, 0}, kRanks);
constexpr EpLimits kLimits{.tokens = 20, .model = kModel, .topk = 2};

std::vector<Batch> three_batches() {
  std::vector<Batch> out;
  out.emplace_back(kMap, std::vector<int64_t>{20, 3, 17}, 2, 1, kModel, 1);
  out.emplace_back(kMap, std::vector<int64_t>{0, 18, 5}, 2, 4, kModel, 2);
  out.emplace_back(kMap, std::vector<int64_t>{7, 20, 0}, 1, 16, kModel, 3);
  return out;
}

// The order of a pipeline: three micro-batches, several in flight.
void run_pipeline(EpGroup& group, std::vector<BatchRun>& run, Stream stream = {}) {
  run[0].forward(group, stream);
  run[1].forward(group, stream);
  run[0].backward(group, stream);
  run[2].forward(group, stream);
  run[1].backward(group, stream);
  run[2].backward(group, stream);
}

std::vector<BatchRun> runs_of(const std::vector<Batch>& batches, int me) {
  std::vector<BatchRun> out;
  for (const Batch& b : batches) out.emplace_back(b, me);
  return out;
}

TEST(EpLifecycle, PlansInFlight) {
  const auto batches = three_batches();
  for (const int depth : {1, 2}) {
    Threads::run(kRanks, [&](comm::Communicator& world) {
      EpLimits limits = kLimits;
      limits.depth = depth;
      EpGroup group = EpGroup::create(world, kMap, limits, {});
      auto runs = runs_of(batches, world.rank());
      run_pipeline(group, runs);
      for (const BatchRun& run : runs) run.expect_all("inline");
      EXPECT_EQ(group.epoch(), 15);
      group.close();
    });
  }
}

TEST(EpLifecycle, PlansInFlightOnADeferredStream) {
  const auto batches = three_batches();
  Threads::run(kRanks, [&](comm::Communicator& world) {
    EpGroup group = EpGroup::create(world, kMap, kLimits, {});
    const Stream stream = Stream::deferred();
    auto runs = runs_of(batches, world.rank());
    run_pipeline(group, runs, stream);
    EXPECT_EQ(group.impl()->running, 0);
    stream.synchronize();
    for (const BatchRun& run : runs) run.expect_all("deferred");
    group.close();
  });
}

TEST(EpLifecycle, TwoGroupsOnTwoStreams) {
  const ExpertMap other(5, kRanks);
  const auto batches = three_batches();
  std::vector<Batch> others;
  for (int i = 0; i < 3; ++i) {
    others.emplace_back(other, std::vector<int64_t>{4, 9, 11}, 3, 8, 70, 10 + i);
  }
  Threads::run(kRanks, [&](comm::Communicator& world) {
    EpGroup a = EpGroup::create(world, kMap, kLimits, {.name = "a"});
    EpGroup b = EpGroup::create(world, other, {.tokens = 11, .model = 70, .topk = 3, .depth = 1},
                                {.name = "b", .chunk_rows = 2});
    const Stream first = Stream::deferred(), second = Stream::deferred();
    auto runs = runs_of(batches, world.rank()), other_runs = runs_of(others, world.rank());
    run_pipeline(a, runs, first);
    run_pipeline(b, other_runs, second);
    // On every rank, b's operations stand between two of a's.
    Event middle;
    middle.record(first);
    for (int i = 0; i < 3; ++i) {
      runs[i].forward(a, first);
      other_runs[i].forward(b, second);
    }
    middle.wait();
    second.synchronize();
    first.synchronize();
    for (const BatchRun& run : runs) run.expect_all("a");
    for (const BatchRun& run : other_runs) run.expect_all("b");
    a.close();
    b.close();
  });
}

TEST(EpLifecycle, ReserveGrowsUnderPlans) {
  const auto batches = three_batches();
  const Batch large(kMap, {60, 3, 100}, 4, 2, 200, 7);
  Threads::run(kRanks, [&](comm::Communicator& world) {
    EpGroup group = EpGroup::create(world, kMap, kLimits, {.name = "moe"});
    auto runs = runs_of(batches, world.rank());
    runs[0].forward(group);
    runs[1].forward(group);
    const EpBytes before = group.bytes();
    EXPECT_EQ(before.total, group.impl()->memory.bytes());

    group.reserve({.tokens = 10, .model = 5, .topk = 1, .depth = 1});  // fits
    EXPECT_EQ(group.bytes().total, before.total);
    runs[0].backward(group);

    group.reserve({.tokens = 100, .model = 200, .topk = 4, .depth = 1});
    EXPECT_EQ(group.limits().depth, 2);
    EXPECT_EQ(group.bytes().total, group.impl()->memory.bytes());
    EXPECT_EQ(group.bytes().total, EpGroup::bytes(kMap, group.limits(), {}).total);
    EXPECT_GT(group.bytes().total, before.total);
    runs[2].forward(group);
    runs[1].backward(group);  // a plan of before
    runs[2].backward(group);
    for (const BatchRun& run : runs) run.expect_all("grown");
    BatchRun run(large, world.rank());
    run.forward(group);
    run.backward(group);
    run.expect_all("large");
    group.close();
  });
}

TEST(EpLifecycle, ReservingWhatIsTooMuchLeavesTheGroupAsItWas) {
  const auto batches = three_batches();
  Threads::run(kRanks, [&](comm::Communicator& world) {
    EpGroup group = EpGroup::create(world, kMap, kLimits, {.name = "moe"});
    EpLimits huge = kLimits;
    huge.tokens = 1 << 20;
    huge.model = 1 << 24;
    const std::string error = error_of([&] { group.reserve(huge); });
    EXPECT_EQ(error, text("symmetric buffer \"moe\": rank 0 could not allocate {}: out of memory",
                          bytes_text(EpGroup::bytes(kMap, huge, {}).total)));
    auto runs = runs_of(batches, world.rank());
    run_pipeline(group, runs);
    for (const BatchRun& run : runs) run.expect_all("after");
    group.close();
  });
}

TEST(EpLifecycle, UseAfterReleaseAndClose) {
  const auto batches = three_batches();
  Threads::run(kRanks, [&](comm::Communicator& world) {
    EpGroup group = EpGroup::create(world, kMap, kLimits, {.name = "moe"});
    auto runs = runs_of(batches, world.rank());
    runs[0].forward(group);
    group.release();
    EXPECT_EQ(group.bytes().total, 0);
    EXPECT_EQ(error_of([&] { runs[0].backward(group); }),
              "ep combine_backward, group \"moe\": released, reserve it first");
    group.release();  // once more is fine

    group.reserve({.tokens = 10, .model = kModel, .topk = 2});
    EXPECT_EQ(group.limits().tokens, 10);
    EXPECT_EQ(error_of([&] { runs[0].backward(group); }),
              "ep combine_backward, group \"moe\": the plan is for up to 20 tokens with K=2, "
              "reserved are 10 with 2");
    group.reserve(kLimits);
    runs[0].backward(group);
    runs[0].expect_all("again");

    group.close();
    group.close();
    EXPECT_EQ(error_of([&] { runs[0].forward(group); }), "ep prepare, group \"moe\": closed");
    EXPECT_EQ(error_of([&] { group.reserve(kLimits); }), "ep, group \"moe\": closed");
    EXPECT_EQ(error_of([&] { group.release(); }), "ep, group \"moe\": closed");
    group.check();
  });
}

TEST(EpLifecycle, RanksMustAgree) {
  Threads::run(2, [&](comm::Communicator& world) {
    const ExpertMap map(4, 2);
    EpLimits limits{.tokens = 8, .model = 16, .topk = 2};
    limits.topk += world.rank();
    const std::string asked =
        "group \"moe\" of 4 experts (owners {}), 8 tokens, model 16, topk {}, 2 bytes an element, "
        "depth 2, rank_fp32 false, token_order false, chunks of 16";
    const std::string error =
        error_of([&] { EpGroup::create(world, map, limits, {.name = "moe"}); });
    const std::string owners = error.substr(error.find("owners ") + 7, 8);
    EXPECT_EQ(error, "ep: rank 0 asks for " + text(asked, owners, 2) + "; rank 1 asks for " +
                         text(asked, owners, 3));
  });
}

int64_t resident_bytes() {
  long pages = 0;
  if (FILE* f = std::fopen("/proc/self/statm", "r")) {
    if (std::fscanf(f, "%*d %ld", &pages) != 1) pages = 0;
    std::fclose(f);
  }
  return int64_t{pages} * 4096;
}

TEST(EpLifecycle, CreateAndCloseReturnAllMemory) {
  Threads::run(2, [&](comm::Communicator& world) {
    const ExpertMap map(4, 2);
    const EpLimits limits{.tokens = 256, .model = 1000, .topk = 2};  // 1 MB
    int64_t before = 0;
    for (int i = 0; i < 100; ++i) {
      if (i == 5) before = resident_bytes();
      EpGroup group = EpGroup::create(world, map, limits, {});
      ASSERT_GT(group.bytes().total, 1 << 20);
      if (i % 2) group.close();  // the destructor does it, too
    }
    world.barrier();
    // Sanitizers hold freed memory back, and find leaks themselves.
    if (!kSanitized) {
      EXPECT_LT(resident_bytes() - before, 50 << 20);  // of 200 MB
    }
  });
}

// Many epochs: halves, flags and credits are used over and over.
TEST(EpLifecycle, ManyOperations) {
  const auto batches = three_batches();
  for (const int depth : {1, 2}) {
    Threads::run(kRanks, [&](comm::Communicator& world) {
      EpLimits limits = kLimits;
      limits.depth = depth;
      EpGroup group = EpGroup::create(world, kMap, limits, {.chunk_rows = 3});
      auto runs = runs_of(batches, world.rank());
      for (BatchRun& run : runs) run.prepare_plan(group);
      std::mt19937 rng(4);  // the same on all ranks
      for (int i = 0; i < (kSanitized ? 300 : 3000); ++i) {
        BatchRun& run = runs[rng() % 3];
        switch (rng() % 4) {
          case 0:
            run.prepare_plan(group);
            break;
          case 1:
            run.dispatch_rows(group);
            break;
          case 2:
            run.combine_rows(group);
            break;
          default:
            run.backward(group);
        }
      }
      run_pipeline(group, runs);
      for (const BatchRun& run : runs) run.expect_all("in the end");
      group.close();
    });
  }
}

}  // namespace
}  // namespace moiety::moe
