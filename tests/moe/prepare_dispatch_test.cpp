// prepare and dispatch in one: the bits, plans and errors of the two calls, over every transport,
// between other operations, and with a rank that is late.
#include "moiety/moe/prepare_dispatch.h"

#include <atomic>
#include <chrono>
#include <thread>

#include "tests/moe/early_run.h"

namespace moiety::moe {
namespace {

constexpr int kRanks = 3, kModel = 37;
const ExpertMap kMap({1, 0, 2, 1, 1, 0, 2, 0}, kRanks);

template <class Transport>
void run_between_others(int depth) {
  const Batch first(kMap, {20, 3, 17}, 2, 4, kModel, 1), second(kMap, {0, 18, 5}, 2, 4, kModel, 2);
  const EpLimits limits{.tokens = 20, .model = kModel, .topk = 2, .depth = depth};
  Transport::run(kRanks, [&](comm::Communicator& world) {
    const int me = world.rank();
    EpGroup group = EpGroup::create(
        world, kMap, limits, {.name = "moe", .chunk_rows = 4, .transport = Transport::kTransport});
    for (const bool deferred : {false, true}) {
      const Stream stream = deferred ? Stream::deferred() : Stream();
      BatchRun whole(first, me);
      EarlyRun a(first, me, first.capacity), b(second, me, second.capacity);
      EarlyRun short_of_rows(first, me, {9, 5, 14});  // rows turn out dead behind their stores
      const Epoch before = group.epoch();
      a.run(group, OverflowPolicy::kError, stream);
      whole.forward(group, stream);
      b.run(group, OverflowPolicy::kError, stream);
      short_of_rows.run(group, OverflowPolicy::kDrop, stream);
      whole.backward(group, stream);
      stream.synchronize();
      EXPECT_EQ(group.epoch(), before + 2 + 3 + 2 + 2 + 2);
      EXPECT_EQ(a.plan.epoch, before + 1);
      a.expect("first");
      b.expect("second");
      short_of_rows.expect("short");
      whole.expect_all("between");
      group.check(group.epoch());
    }
    group.close();
  });
}

TEST(PrepareDispatch, EqualsTheTwoCalls) {
  for (const int depth : {2, 3, 5}) run_between_others<Threads>(depth);
  run_between_others<ThreadCollectives>(2);
}

TEST(PrepareDispatch, OfOneRank) {
  const ExpertMap map(4, 1);
  const Batch batch(map, {30}, 2, 1, kModel, 5);
  Threads::run(1, [&](comm::Communicator& world) {
    const EpLimits limits{.tokens = 30, .model = kModel, .topk = 2};
    EpGroup group = EpGroup::create(world, map, limits, {});
    Mat<int64_t> idx(batch.plan.in.idx[0], 2);
    Mat<bf16> x(batch.x[0], kModel), rows(batch.capacity[0], kModel);
    const PrepareArgs args{.idx_TK = idx.view(), .capacity = batch.capacity[0]};
    const PlanMemory memory(map, limits, args);
    const EpPlan plan = prepare_dispatch(group, args, {.x_TD = x.view(), .rows_CD = rows.view()},
                                         memory.view(), {});
    expect_plan(plan, batch.plan, 0);
    rows.expect(batch.rows[0], false, "rows");
    group.close();
  });
}

TEST(PrepareDispatch, ErrorsAreThoseOfTheTwoCalls) {
  const Batch batch(kMap, {20, 3, 17}, 2, 4, kModel, 1, Routing::kRandom);
  Threads::run(kRanks, [&](comm::Communicator& world) {
    const int me = world.rank();
    EpLimits limits{.tokens = 20, .model = kModel, .topk = 2, .depth = 1};
    EpGroup group = EpGroup::create(world, kMap, limits, {.name = "moe"});
    EarlyRun lost(batch, me, {0, 0, 4});
    EXPECT_EQ(error_of([&] { lost.run(group); }),
              "ep prepare_dispatch, group \"moe\": depth is 1, but rows are sent before the next "
              "epoch's credit: reserve with depth >= 2");
    limits.depth = 2;
    group.reserve(limits);
    lost.run(group);
    EXPECT_NE(error_of([&] { group.check(lost.plan.epoch); }).find("capacity 0"),
              std::string::npos);
    group.close();
  });
}

// A rank that makes the two calls is told so, since its rows may be elsewhere.
TEST(PrepareDispatch, IsNotMixedWithTheTwoCalls) {
  const Batch batch(kMap, {20, 3, 17}, 2, 1, kModel, 1);
  Threads::run(kRanks, [&](comm::Communicator& world) {
    const int me = world.rank();
    const EpLimits limits{.tokens = 20, .model = kModel, .topk = 2};
    EpGroup group = EpGroup::create(world, kMap, limits, {.name = "moe"});
    const std::string error = error_of([&] {
      if (me == 1) {
        BatchRun run(batch, me);
        run.prepare_plan(group);
        run.dispatch_rows(group);
      } else {
        EarlyRun(batch, me, batch.capacity).run(group);
      }
    });
    EXPECT_NE(error.find("dispatch(bf16, 74 B"), std::string::npos) << error;
    EXPECT_NE(error.find("early"), std::string::npos) << error;
    group.close();
  });
}

TEST(PrepareDispatch, OneRankIsLateAtEveryStore) {
  const Batch batch(kMap, {20, 3, 17}, 2, 4, kModel, 1);
  const EpLimits limits{.tokens = 20, .model = kModel, .topk = 2};
  for (int late = 0; late < kRanks; ++late) {
    Threads::run(kRanks, [&](comm::Communicator& world) {
      const int me = world.rank();
      const auto delay = [&] {
        if (me == late) std::this_thread::sleep_for(std::chrono::microseconds(300));
      };
      EpGroup group = EpGroup::create(world, kMap, limits,
                                      {.name = "moe", .chunk_rows = 3, .before_store = delay});
      for (int i = 0; i < (kSanitized ? 2 : 6); ++i) {
        EarlyRun run(batch, me, batch.capacity);
        BatchRun whole(batch, me);
        run.run(group);
        whole.forward(group);
        run.expect("late");
      }
      group.close();
    });
  }
}

}  // namespace
}  // namespace moiety::moe
