// Several plans in flight, several groups, growth and release of memory, the end of a group: a
// suite typed by what runs it (ep_helpers.h).
#pragma once

#include <cstdio>

#include "tests/moe/ep_batch.h"

namespace moiety::moe::lifecycle {

inline constexpr int kRanks = 3, kModel = 33;
inline const ExpertMap kMap({1, 0, 2, 1, 1, 0, 2, 0}, kRanks);
inline constexpr EpLimits kLimits{.tokens = 20, .model = kModel, .topk = 2};

inline std::vector<Batch> three_batches() {
  std::vector<Batch> out;
  out.emplace_back(kMap, std::vector<int64_t>{20, 3, 17}, 2, 1, kModel, 1);
  out.emplace_back(kMap, std::vector<int64_t>{0, 18, 5}, 2, 4, kModel, 2);
  out.emplace_back(kMap, std::vector<int64_t>{7, 20, 0}, 1, 16, kModel, 3);
  return out;
}

// The order of a pipeline: three micro-batches, several in flight.
inline void run_pipeline(EpGroup& group, std::vector<BatchRun>& run, Stream stream = {}) {
  run[0].forward(group, stream);
  run[1].forward(group, stream);
  run[0].backward(group, stream);
  run[2].forward(group, stream);
  run[1].backward(group, stream);
  run[2].backward(group, stream);
}

inline std::vector<BatchRun> runs_of(const std::vector<Batch>& batches, int me) {
  std::vector<BatchRun> out;
  for (const Batch& b : batches) out.emplace_back(b, me);
  return out;
}

template <class Transport>
class EpLifecycle : public testing::Test {
 protected:
  void SetUp() override {
    if (!Transport::has(kRanks)) GTEST_SKIP() << "needs " << kRanks << " ranks";
  }
  static EpOptions options(const std::string& name = "moe", int chunk_rows = 16) {
    return {.name = name, .chunk_rows = chunk_rows, .transport = Transport::kTransport};
  }
};
TYPED_TEST_SUITE_P(EpLifecycle);

TYPED_TEST_P(EpLifecycle, PlansInFlight) {
  const auto batches = three_batches();
  for (const int depth : {1, 2}) {
    TypeParam::run(kRanks, [&](comm::Communicator& world) {
      EpLimits limits = kLimits;
      limits.depth = depth;
      EpGroup group = EpGroup::create(world, kMap, limits, TestFixture::options());
      auto runs = runs_of(batches, world.rank());
      run_pipeline(group, runs);
      for (const BatchRun& run : runs) run.expect_all("inline");
      EXPECT_EQ(group.epoch(), 15);
      group.close();
    });
  }
}

TYPED_TEST_P(EpLifecycle, PlansInFlightOnADeferredStream) {
  const auto batches = three_batches();
  TypeParam::run(kRanks, [&](comm::Communicator& world) {
    EpGroup group = EpGroup::create(world, kMap, kLimits, TestFixture::options());
    const Stream stream = Stream::deferred();
    auto runs = runs_of(batches, world.rank());
    run_pipeline(group, runs, stream);
    EXPECT_EQ(group.impl()->exchange->epoch(), 0);
    stream.synchronize();
    for (const BatchRun& run : runs) run.expect_all("deferred");
    group.close();
  });
}

TYPED_TEST_P(EpLifecycle, TwoGroupsOnTwoStreams) {
  const ExpertMap other(5, kRanks);
  const auto batches = three_batches();
  std::vector<Batch> others;
  for (int i = 0; i < 3; ++i) {
    others.emplace_back(other, std::vector<int64_t>{4, 9, 11}, 3, 8, 70, 10 + i);
  }
  TypeParam::run(kRanks, [&](comm::Communicator& world) {
    EpGroup a = EpGroup::create(world, kMap, kLimits, TestFixture::options("a"));
    EpGroup b = EpGroup::create(world, other, {.tokens = 11, .model = 70, .topk = 3, .depth = 1},
                                TestFixture::options("b", 2));
    const Stream first = Stream::deferred(), second = Stream::deferred();
    auto runs = runs_of(batches, world.rank()), other_runs = runs_of(others, world.rank());
    run_pipeline(a, runs, first);
    run_pipeline(b, other_runs, second);
    // On every rank b's operations stand between two of a's.
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

TYPED_TEST_P(EpLifecycle, ReserveGrowsUnderPlans) {
  const auto batches = three_batches();
  const Batch large(kMap, {60, 3, 100}, 4, 2, 200, 7);
  TypeParam::run(kRanks, [&](comm::Communicator& world) {
    EpGroup group = EpGroup::create(world, kMap, kLimits, TestFixture::options());
    auto runs = runs_of(batches, world.rank());
    runs[0].forward(group);
    runs[1].forward(group);
    const EpBytes before = group.bytes();
    EXPECT_EQ(before.total, memory_bytes(group));

    group.reserve({.tokens = 10, .model = 5, .topk = 1, .depth = 1});  // fits
    EXPECT_EQ(group.bytes().total, before.total);
    runs[0].backward(group);

    group.reserve({.tokens = 100, .model = 200, .topk = 4, .depth = 1});
    EXPECT_EQ(group.limits().depth, 2);
    EXPECT_EQ(group.bytes().total, memory_bytes(group));
    EXPECT_EQ(group.bytes().total,
              EpGroup::bytes(kMap, group.limits(), TestFixture::options()).total);
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

TYPED_TEST_P(EpLifecycle, ReservingWhatIsTooMuchLeavesTheGroupAsItWas) {
  const auto batches = three_batches();
  TypeParam::run(kRanks, [&](comm::Communicator& world) {
    EpGroup group = EpGroup::create(world, kMap, kLimits, TestFixture::options());
    EpLimits huge = kLimits;
    huge.tokens = 1 << 20;
    huge.model = 1 << 24;
    const std::string error = error_of([&] { group.reserve(huge); });
    const bool maps = TypeParam::kTransport == EpTransport::kMapped;
    EXPECT_EQ(error, text("{} \"moe\": rank 0 could not allocate {}: out of memory",
                          maps ? "symmetric buffer" : "ep, group",
                          bytes_text(EpGroup::bytes(kMap, huge, TestFixture::options()).total)));
    auto runs = runs_of(batches, world.rank());
    run_pipeline(group, runs);
    for (const BatchRun& run : runs) run.expect_all("after");
    group.close();
  });
}

TYPED_TEST_P(EpLifecycle, UseAfterReleaseAndClose) {
  const auto batches = three_batches();
  TypeParam::run(kRanks, [&](comm::Communicator& world) {
    EpGroup group = EpGroup::create(world, kMap, kLimits, TestFixture::options());
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

TYPED_TEST_P(EpLifecycle, RanksMustAgree) {
  TypeParam::run(2, [&](comm::Communicator& world) {
    const ExpertMap map(4, 2);
    const EpLimits limits{.tokens = 8, .model = 16, .topk = 2};
    const std::string asked =
        "group \"moe\" of 4 experts (owners {}), 8 tokens, model 16, topk {}, rows of bf16, "
        "depth 2, rank_fp32 false, token_order false, peer_rows {}, staged true, chunks of 16, "
        "transport {}, "
        "zero_copy off";
    const auto expect = [&](const EpLimits& mine, const EpOptions& options, auto rank0,
                            auto rank1) {
      const std::string error = error_of([&] { EpGroup::create(world, map, mine, options); });
      const std::string owners = error.substr(error.find("owners ") + 7, 8);
      EXPECT_EQ(error,
                "ep: rank 0 asks for " + rank0(owners) + "; rank 1 asks for " + rank1(owners));
    };
    const bool maps = TypeParam::kTransport == EpTransport::kMapped;
    const char* transport = maps ? "kMapped" : "kCollectives";
    const auto describe = [&](int topk, int rows, const char* transport_name) {
      return [=](const std::string& owners) {
        return text(asked, owners, topk, rows, transport_name);
      };
    };
    EpLimits other = limits;
    other.topk += world.rank();
    expect(other, TestFixture::options(), describe(2, 0, transport), describe(3, 0, transport));
    other = limits;
    other.peer_rows = 5 + world.rank();
    expect(other, TestFixture::options(), describe(2, 5, transport), describe(2, 6, transport));
    EpOptions options = TestFixture::options();
    if (world.rank() == 1) options.transport = EpTransport::kAuto;
    expect(limits, options, describe(2, 0, transport), describe(2, 0, "kAuto"));
  });
}

inline int64_t resident_bytes() {
  long pages = 0;
  if (FILE* f = std::fopen("/proc/self/statm", "r")) {
    if (std::fscanf(f, "%*d %ld", &pages) != 1) pages = 0;
    std::fclose(f);
  }
  return int64_t{pages} * 4096;
}

TYPED_TEST_P(EpLifecycle, CreateAndCloseReturnAllMemory) {
  TypeParam::run(2, [&](comm::Communicator& world) {
    const ExpertMap map(4, 2);
    const EpLimits limits{.tokens = 256, .model = 1000, .topk = 2};  // 1 MB
    int64_t before = 0;
    for (int i = 0; i < 100; ++i) {
      if (i == 5) before = resident_bytes();
      EpGroup group = EpGroup::create(world, map, limits, TestFixture::options());
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
TYPED_TEST_P(EpLifecycle, ManyOperations) {
  const auto batches = three_batches();
  for (const int depth : {1, 2}) {
    TypeParam::run(kRanks, [&](comm::Communicator& world) {
      EpLimits limits = kLimits;
      limits.depth = depth;
      EpGroup group = EpGroup::create(world, kMap, limits, TestFixture::options("moe", 3));
      auto runs = runs_of(batches, world.rank());
      for (BatchRun& run : runs) run.prepare_plan(group);
      std::mt19937 rng(4);  // the same on all ranks
      for (int i = 0; i < TypeParam::kManyOperations; ++i) {
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

// The operations of BatchRun, and how errors call them.
struct RowOperation {
  void (*run)(BatchRun& run, EpGroup& group);
  const char* text;
};
inline const RowOperation kRowOperations[] = {
    {[](BatchRun& run, EpGroup& group) { run.dispatch_rows(group); }, "dispatch(bf16, {} B)"},
    {[](BatchRun& run, EpGroup& group) { run.combine_rows(group); }, "combine(bf16, {} B, kRank)"},
    {[](BatchRun& run, EpGroup& group) { run.combine_backward_rows(group); },
     "combine_backward(bf16, {} B)"},
    {[](BatchRun& run, EpGroup& group) { run.dispatch_backward_rows(group); },
     "dispatch_backward(bf16, {} B, kRank)"},
};
inline std::string run_text(const RowOperation& operation, int64_t row_bytes, Epoch plan) {
  std::string out = operation.text;
  out.replace(out.find("{}"), 2, std::to_string(row_bytes));
  return out + text(" of plan {}", plan);
}

// Rank 1 runs `its`, the others `ours`: every rank names two that differ.
inline void expect_named(const std::string& said, Epoch epoch, const std::string& ours,
                         const std::string& its) {
  bool named = false;
  for (const int other : {0, 2}) {
    const std::string where = text("ep, group \"moe\", epoch {}: ", epoch);
    named = named || said == where + text("rank {} runs {}, rank 1 runs {}", other, ours, its) ||
            said == where + text("rank 1 runs {}, rank {} runs {}", its, other, ours);
  }
  EXPECT_TRUE(named) << said;
}

TYPED_TEST_P(EpLifecycle, RanksWithPlansOfDifferentBatchesAreNamed) {
  // All masked: nobody has rows to send.
  for (const Routing routing : {Routing::kSomeMasked, Routing::kAllMasked}) {
    const std::vector<int64_t> tokens{20, 20, 20};
    const Batch first(kMap, tokens, 2, 1, kModel, 5, routing);
    const Batch second(kMap, tokens, 2, 1, kModel, 6, routing);
    for (const RowOperation& operation : kRowOperations) {
      TypeParam::run(kRanks, [&](comm::Communicator& world) {
        EpGroup group = EpGroup::create(world, kMap, kLimits, TestFixture::options());
        BatchRun a(first, world.rank()), b(second, world.rank());
        a.prepare_plan(group);
        b.prepare_plan(group);
        const std::string said = error_of([&] { operation.run(world.rank() == 1 ? b : a, group); });
        expect_named(said, 3, run_text(operation, 66, 1), run_text(operation, 66, 2));
        EXPECT_EQ(error_of([&] { group.check(); }), said);
        world.barrier();
        group.close();
      });
    }
  }
}

// 40 and 40 + 2 x 1021 bytes.
TYPED_TEST_P(EpLifecycle, RowSizesOfAnyDifferenceAreNamed) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "rows of two sizes lie over each other until the sizes are compared";
#endif
  const std::vector<int64_t> tokens{20, 20, 20};
  const Batch narrow(kMap, tokens, 2, 1, 20, 5), wide(kMap, tokens, 2, 1, 20 + 1021, 5);
  EpLimits limits = kLimits;
  limits.model = wide.model;
  for (const RowOperation& operation : kRowOperations) {
    TypeParam::run(kRanks, [&](comm::Communicator& world) {
      EpGroup group = EpGroup::create(world, kMap, limits, TestFixture::options());
      BatchRun a(narrow, world.rank()), b(wide, world.rank());
      a.prepare_plan(group);
      b.plan = a.plan;
      const std::string said = error_of([&] { operation.run(world.rank() == 1 ? b : a, group); });
      expect_named(said, 2, run_text(operation, 40, 1), run_text(operation, 40 + 2 * 1021, 1));
      world.barrier();
      group.close();
    });
  }
}

REGISTER_TYPED_TEST_SUITE_P(EpLifecycle, PlansInFlight, PlansInFlightOnADeferredStream,
                            TwoGroupsOnTwoStreams, ReserveGrowsUnderPlans,
                            ReservingWhatIsTooMuchLeavesTheGroupAsItWas, UseAfterReleaseAndClose,
                            RanksMustAgree, CreateAndCloseReturnAllMemory, ManyOperations,
                            RanksWithPlansOfDifferentBatchesAreNamed,
                            RowSizesOfAnyDifferenceAreNamed);

}  // namespace moiety::moe::lifecycle
