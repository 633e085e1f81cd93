// The planner: its outcomes on named traces, its invariants on random ones.
#include "moiety/gtp/plan.h"

#include <algorithm>
#include <map>

#include <gtest/gtest.h>

#include "moiety/base/error.h"
#include "tests/gtp/traces.h"
#include "tests/support/error_of.h"

namespace moiety::gtp {
namespace {

constexpr int64_t kMiB = 1 << 20;

template <class F>
std::string refusal_of(F&& f) {
  return error_of(f, ErrorKind::kInvalidArgument);
}

Plan checked(std::span<const TraceEvent> trace, std::span<const BundleSpec> bundles,
             const Policy& policy) {
  Plan out = plan(trace, bundles, policy);
  EXPECT_EQ(check_plan(out, trace, bundles, policy).value_or("sound"), "sound");
  return out;
}

int32_t count_slots(const Plan& plan, SlotUse use) {
  return static_cast<int32_t>(std::count_if(plan.slots.begin(), plan.slots.end(),
                                            [&](const SlotSpec& s) { return s.use == use; }));
}

std::vector<BundleSpec> chain_of(int n) {
  std::vector<BundleSpec> out;
  for (int i = 0; i < n; ++i) out.push_back(bundle_of("w" + std::to_string(i), kMiB));
  return out;
}

// ---- named traces

TEST(Plan, OfNothing) {
  const std::vector<BundleSpec> bundles = chain_of(1);
  const Plan none = checked({}, bundles, {});
  EXPECT_EQ(none.positions, 0);
  EXPECT_TRUE(none.slots.empty());
  const Plan empty = checked(TraceMaker().flush(), bundles, {});
  EXPECT_EQ(empty.positions, 2);
  EXPECT_TRUE(empty.gathers.empty());
  EXPECT_NE(none.hash, empty.hash);
}

TEST(Plan, OfOneUse) {
  const Plan p = checked(TraceMaker().fwd(0).flush(), chain_of(1), {});
  ASSERT_EQ(p.gathers.size(), 1u);
  EXPECT_EQ(p.gathers[0].issue, 0);
  EXPECT_EQ(p.gathers[0].first_use, 1);
  EXPECT_TRUE(p.gathers[0].publishes);
  EXPECT_EQ(p.report.bytes, kMiB);
  EXPECT_EQ(p.report.received, kMiB / 2);
}

// A chain of equal bundles has as many slots as it looks ahead, and one.
TEST(Plan, ChainHasOneSlotMoreThanItLooksAhead) {
  for (int ahead = 1; ahead <= 8; ++ahead) {
    TraceMaker maker(1);  // work is nothing beside a transfer: as early as is allowed
    for (int i = 0; i < 20; ++i) maker.fwd(i);
    Policy policy;
    policy.max_ahead_dense = ahead;
    const Plan p = checked(maker.flush(), chain_of(20), policy);
    EXPECT_EQ(p.slots.size(), static_cast<size_t>(ahead + 1));
    EXPECT_EQ(p.gathers[12].issue, 13 - ahead);
  }
}

// If work is long, one gather ahead is enough: two slots.
TEST(Plan, JustInTime) {
  TraceMaker maker(1e6f);
  for (int i = 0; i < 20; ++i) maker.fwd(i);
  for (int i = 20; i-- > 0;) maker.bwd(i).wgrad(i);
  const Plan p = checked(maker.flush(), chain_of(20), {});
  EXPECT_EQ(count_slots(p, SlotUse::kGather), 2);
  EXPECT_EQ(count_slots(p, SlotUse::kSend), 2);
  // All but the first gather are hidden: the first takes latency and transfer.
  EXPECT_DOUBLE_EQ(p.report.gather_wait_ns, 20e3 + (kMiB / 2) / 300.0);
  EXPECT_DOUBLE_EQ(p.report.send_wait_ns, 0);
  EXPECT_NEAR(p.report.flush_wait_ns, 20e3 + kMiB / 300.0, 1e-6);
  EXPECT_DOUBLE_EQ(p.report.work_ns, 60e6);
}

TEST(Plan, ScheduleOfTwoBundles) {
  const auto trace = TraceMaker(100).fwd(0).fwd(1).wgrad(1).wgrad(0).flush();
  std::vector<BundleSpec> bundles = chain_of(2);
  for (BundleSpec& b : bundles) b.gather[0].received = b.reduce.received = 30;
  const Policy policy{.latency_ns = 10, .bytes_per_ns = 1, .send_bytes = 0};
  const Plan p = checked(trace, bundles, policy);
  const Schedule s = simulate(p, trace, bundles, policy);
  const auto expect = [](const Schedule::Span& span, double begin, double end) {
    EXPECT_EQ(span.begin, begin);
    EXPECT_EQ(span.end, end);
  };
  ASSERT_EQ(s.work.size(), 8u);
  expect(s.gathers[0], 0, 40);
  expect(s.work[1], 40, 140);
  expect(s.gathers[1], 40, 80);  // beside the work of the first
  expect(s.work[2], 140, 240);
  expect(s.reduces[0], 340, 380);
  expect(s.work[5], 380, 480);  // the one send slot is still in use
  expect(s.reduces[1], 480, 520);
  EXPECT_EQ(s.gather_wait, 40);
  EXPECT_EQ(s.send_wait, 40);
  EXPECT_EQ(s.flush_wait, 40);
}

// Nothing is gathered, the lookup is waited for, and the send slot is that of rows.
TEST(Plan, ScheduleOfRows) {
  std::vector<BundleSpec> bundles = chain_of(1);
  bundles[0].rows = {.tokens = 9, .lookup = 60, .reduce = {70, 500, 800}};
  TraceMaker maker(100);
  maker.call(Kind::kRows, 0).call(Kind::kRowsGrad, 0).call(Kind::kRowsGrad, 0);
  const auto trace = maker.flush();
  const Policy policy{.latency_ns = 10, .bytes_per_ns = 1, .send_bytes = 0};
  const Plan p = checked(trace, bundles, policy);
  EXPECT_TRUE(p.gathers.empty());
  ASSERT_EQ(p.reduces.size(), 2u);
  EXPECT_TRUE(p.reduces[0].by_rows && p.reduces[0].first && p.reduces[1].last);
  EXPECT_EQ(p.report.received, 60 + 2 * 70);
  EXPECT_EQ(p.report.bytes, 500 + 800);
  const Schedule s = simulate(p, trace, bundles, policy);
  EXPECT_EQ(s.gather_wait, 70);
  EXPECT_EQ(s.work[1].begin, 70);
  EXPECT_EQ(s.reduces[0].begin, s.work[2].begin);
  EXPECT_EQ(s.reduces[1].begin, s.work[3].begin);
}

TEST(Plan, RecomputeAndBackwardShareAGather) {
  const auto trace = TraceMaker(1e5f).fwd(0).fwd(1).again(0).bwd(0).flush();
  std::vector<BundleSpec> bundles = chain_of(2);
  Plan p = checked(trace, bundles, {});
  ASSERT_EQ(p.gathers.size(), 2u);
  EXPECT_EQ(p.gathers[0].views, kRowView | kColView);
  EXPECT_EQ(p.gathers[0].last_use, 4);
  EXPECT_EQ(p.report.merges, 2);
  // Further away than keep_span.
  p = checked(trace, bundles, {.keep_span = 1});
  EXPECT_EQ(p.gathers.size(), 3u);
  // Nor without memory to keep it in.
  p = checked(trace, bundles, {.keep_bytes = kMiB - 1});
  EXPECT_EQ(p.gathers.size(), 4u);
  // Two payloads: the views have nothing in common.
  bundles[0].one_payload = false;
  p = checked(trace, bundles, {});
  ASSERT_EQ(p.gathers.size(), 3u);
  EXPECT_EQ(p.gathers[2].payload, Payload::kCol);
  EXPECT_FALSE(p.gathers[2].publishes);
}

// Short spans first, then the earlier; what is kept adds up.
TEST(Plan, KeepsShortSpansFirst) {
  const auto trace = TraceMaker(1e5f).fwd(0).fwd(1).fwd(0).fwd(2).fwd(2).fwd(1).flush();
  const auto kept = [&](int64_t bytes) {
    const Plan p = checked(trace, chain_of(3), {.keep_span = 5, .keep_bytes = bytes});
    std::vector<BundleId> out;
    for (const Gather& g : p.gathers) {
      if (g.first_use < g.last_use) out.push_back(g.bundle);
    }
    return out;
  };
  EXPECT_EQ(kept(0), (std::vector<BundleId>{}));
  EXPECT_EQ(kept(kMiB), (std::vector<BundleId>{0, 2}));
  EXPECT_EQ(kept(2 * kMiB), (std::vector<BundleId>{0, 1, 2}));
}

// Experts are looked ahead by a block; their linears share a lane, dense weights have another.
TEST(Plan, ExpertsAreLookedAheadByABlock) {
  std::vector<BundleSpec> bundles;
  TraceMaker maker;
  for (int block = 0; block < 6; ++block) {
    const auto at = static_cast<BundleId>(bundles.size());
    for (const char* name : {"qkv", "o"}) bundles.push_back(bundle_of(name, kMiB));
    for (const char* name : {"fc1", "fc2"}) {
      bundles.push_back(bundle_of(name, 16 * kMiB));
      bundles.back().expert = true;
      bundles.back().group = 1;
    }
    maker.work(6e4f).fwd(at).fwd(at + 1).work(1e3f).fwd(at + 2).fwd(at + 3);
  }
  const Plan p = checked(maker.flush(), bundles, {});
  EXPECT_EQ(p.lanes.size(), 2u);
  for (const Gather& g : p.gathers) {
    const int linear = g.bundle % 4;
    EXPECT_EQ(g.lane, linear / 2);
    // A transfer of experts takes all of an attention linear, with the slack: the two linears of a
    // block are fetched while its attention runs, qkv while the experts before do.
    constexpr int kAhead[] = {3, 1, 2, 2};
    if (g.first_use < 5) continue;
    EXPECT_EQ(g.first_use - g.issue, kAhead[linear]);
  }
}

TEST(Plan, EmbeddingWithoutDataGradientIsGatheredOnce) {
  const auto trace = TraceMaker(1e5f).fwd(0).fwd(1).bwd(1).wgrad(1).wgrad(0).flush();
  const Plan p = checked(trace, chain_of(2), {});
  EXPECT_EQ(std::count_if(p.gathers.begin(), p.gathers.end(),
                          [](const Gather& g) { return g.bundle == 0; }),
            1);
}

TEST(Plan, GroupsOfOneMoveNothing) {
  const std::vector<BundleSpec> bundles{bundle_of("w", kMiB, 1)};
  const Plan p = checked(TraceMaker(1).fwd(0).bwd(0).wgrad(0).wgrad(0).flush(), bundles, {});
  EXPECT_TRUE(p.gathers.empty() && p.lanes.empty() && p.slots.empty());
  ASSERT_EQ(p.reduces.size(), 2u);
  EXPECT_TRUE(p.reduces[0].first && !p.reduces[0].last && p.reduces[1].last);
}

TEST(Plan, FusedCallsShareAPosition) {
  const auto trace = TraceMaker(1e5f).fwd(0).also(1).also(2).flush();
  const Plan p = checked(trace, chain_of(3), {});
  EXPECT_EQ(p.positions, 3);
  EXPECT_EQ(p.waits[1].size(), 3u);
  EXPECT_EQ(p.slots.size(), 3u);
}

TEST(Plan, SendsGiveTheirSlotsUpEarlyForSendBytes) {
  TraceMaker maker(1e3f);  // reduces take 23 positions each: they queue up
  for (int i = 0; i < 10; ++i) maker.wgrad(i);
  const auto trace = maker.flush();
  const Plan free = checked(trace, chain_of(10), {});
  EXPECT_EQ(count_slots(free, SlotUse::kSend), 10);
  const Plan some = checked(trace, chain_of(10), {.send_bytes = 10 * kMiB});
  EXPECT_EQ(count_slots(some, SlotUse::kSend), 5);
  EXPECT_GT(some.report.shortened, 0);
  EXPECT_GT(some.report.send_wait_ns, 0);
  const Plan one = checked(trace, chain_of(10), {.send_bytes = 0});
  EXPECT_EQ(count_slots(one, SlotUse::kSend), 1);
  EXPECT_LT(some.report.send_wait_ns, one.report.send_wait_ns);
}

TEST(Plan, WhatCrossesACutHasSlotsAndEventsOfItsOwn) {
  const auto trace = TraceMaker(1e5f).fwd(0).fwd(1).cut().fwd(2).fwd(3).flush();
  Plan p = checked(trace, chain_of(4), {});
  EXPECT_EQ(p.report.crossings, 1);
  ASSERT_EQ(p.gathers[2].bundle, 2);
  EXPECT_EQ(p.gathers[2].issue, 2);
  EXPECT_TRUE(p.gathers[2].crosses);
  EXPECT_GE(p.gathers[2].ready_event, p.external);
  EXPECT_LT(p.gathers[3].ready_event, p.external);
  for (const Gather& g : p.gathers) EXPECT_EQ(p.slots[g.slot].crosses, g.bundle == 2);
  p = checked(trace, chain_of(4), {.cross_cuts = false});
  EXPECT_EQ(p.report.crossings, 0);
  EXPECT_EQ(p.gathers[2].issue, 3);
}

TEST(Plan, SendsWaitAcrossNoCutUnlessTheyMay) {
  const auto trace = TraceMaker(1e3f).wgrad(0).cut().fwd(0).fwd(0).fwd(0).flush();
  EXPECT_TRUE(checked(trace, chain_of(1), {}).reduces[0].crosses);
  const Plan p = checked(trace, chain_of(1), {.cross_cuts = false});
  EXPECT_FALSE(p.reduces[0].crosses);
  EXPECT_EQ(p.reduces[0].free, 2);
}

// ---- the budget

TEST(Plan, BudgetGivesUpMergesThenLookAhead) {
  TraceMaker maker(1e3f);
  for (int i = 0; i < 8; ++i) maker.fwd(i).fwd((i + 7) % 8);
  const auto trace = maker.flush();
  Policy policy{.max_ahead_dense = 6, .keep_span = 8};
  const Plan free = checked(trace, chain_of(8), policy);
  EXPECT_EQ(free.report.undone, 0);
  for (int64_t slots = free.report.bytes / kMiB; slots-- > 2;) {
    policy.slot_bytes = slots * kMiB;
    const Plan p = checked(trace, chain_of(8), policy);
    EXPECT_LE(p.report.bytes, policy.slot_bytes);
    EXPECT_EQ(p.report.merges + p.report.undone, free.report.merges);
    if (slots == 2) {
      EXPECT_EQ(p.report.merges, 0);
    }
  }
  policy.slot_bytes = kMiB;
  EXPECT_EQ(refusal_of([&] { plan(trace, chain_of(8), policy); }),
            "gtp plan: slots need 2.0 MiB, slot_bytes allows 1.0 MiB; the largest are 2 dense "
            "gather slots of 1.0 MiB");
}

TEST(Plan, PolicyForMemory) {
  const Policy p = Policy::for_memory(int64_t{80} << 30);
  EXPECT_EQ(p.slot_bytes, int64_t{12} << 30);
  EXPECT_EQ(p.keep_bytes, int64_t{6} << 30);
  EXPECT_EQ(p.send_bytes, int64_t{6} << 30);
}

// ---- errors

TEST(Plan, RefusesFaultyTraces) {
  const std::vector<BundleSpec> bundles = chain_of(2);
  const auto error = [&](const std::vector<TraceEvent>& trace) {
    return refusal_of([&] { plan(trace, bundles, {}); });
  };
  EXPECT_EQ(error(TraceMaker().fwd(0).buffer(1).flush()),
            "gtp trace: grad buffer of bundle 1 at position 2 is never reduced");
  EXPECT_EQ(error(TraceMaker().buffer(1).buffer(1).flush()),
            "gtp trace: grad buffer of bundle 1 at position 2, that of position 1 was not reduced");
  EXPECT_EQ(error(TraceMaker().grad(0).flush()),
            "gtp trace: grad of bundle 0 at position 1 without a buffer");
  EXPECT_EQ(error(TraceMaker().fwd(2).flush()),
            "gtp trace: forward of bundle 2 at position 1, of 2 bundles");
  EXPECT_EQ(error(TraceMaker().fwd(0).also(0).flush()),
            "gtp trace: bundle 0 named twice in the call at position 1");
  EXPECT_EQ(error({{Kind::kFwd, 0}}),
            "gtp trace: from forward to forward in 1 events, expected begin to flush");
  EXPECT_EQ(error({{Kind::kBegin}, {Kind::kFlush}, {Kind::kFlush}}),
            "gtp trace: flush at event 1 of 3");
  EXPECT_EQ(error({{Kind::kBegin}, {Kind::kFwd, 0}, {Kind::kBwd, 1, true}, {Kind::kFlush}}),
            "gtp trace: backward of bundle 1 in the call at position 1, which is forward");
  EXPECT_EQ(error(TraceMaker().work(-1).fwd(0).flush()), "gtp trace: work of -1 ns at position 1");
}

TEST(Plan, RefusesFaultyBundlesAndPolicies) {
  std::vector<BundleSpec> bundles = chain_of(1);
  bundles[0].group_size = 0;
  EXPECT_EQ(refusal_of([&] { plan({}, bundles, {}); }), "gtp plan: bundle 0 w0 has a group of 0");
  bundles = chain_of(1);
  bundles[0].reduce.slot = -4;
  EXPECT_NE(refusal_of([&] { plan({}, bundles, {}); }).find("the reduce of bundle 0 w0 receives"),
            std::string::npos);
  EXPECT_NE(refusal_of([&] { plan({}, {}, {.bytes_per_ns = 0}); }), "no error");
  EXPECT_NE(refusal_of([&] { plan({}, {}, {.max_ahead_dense = 0}); }), "no error");
}

// ---- random traces

TEST(Plan, InvariantsHoldOnRandomTraces) {
  int merged = 0, crossing = 0, shortened = 0, fused = 0, repeated = 0;
  for (uint64_t seed = 0; seed < 4000; ++seed) {
    const TraceCase c = random_case(seed);
    const Plan p = plan(c.trace, c.bundles, c.policy);
    ASSERT_EQ(check_plan(p, c.trace, c.bundles, c.policy).value_or("sound"), "sound")
        << "seed " << seed;
    merged += p.report.merges > 0;
    crossing += p.report.crossings > 0;
    shortened += p.report.shortened > 0;
    fused += p.positions < static_cast<int32_t>(c.trace.size());
    repeated += p.gathers.size() > 2 * c.bundles.size();
  }
  // The traces are of all kinds.
  for (const int n : {merged, crossing, shortened, fused, repeated}) EXPECT_GT(n, 200);
}

TEST(Plan, IsTheSameEachTime) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const TraceCase a = random_case(seed), b = random_case(seed);
    const uint64_t hash = plan(a.trace, a.bundles, a.policy).hash;
    EXPECT_EQ(plan(b.trace, b.bundles, b.policy).hash, hash);
    EXPECT_NE(plan(random_case(seed + 1).trace, random_case(seed + 1).bundles,
                   random_case(seed + 1).policy)
                  .hash,
              hash);
  }
}

// Any budget either holds or is refused, and the refusal is right: at least what the smallest
// look-ahead without merges needs.
TEST(Plan, BudgetEnds) {
  int refused = 0, squeezed = 0;
  for (uint64_t seed = 0; seed < 600; ++seed) {
    TraceCase c = random_case(seed);
    Policy least = c.policy;
    least.keep_span = 0;
    least.max_ahead_dense = least.max_ahead_expert = 1;
    const int64_t smallest = plan(c.trace, c.bundles, least).report.bytes;
    const int64_t free = plan(c.trace, c.bundles, c.policy).report.bytes;
    for (const int part : {0, 1, 2, 3}) {
      c.policy.slot_bytes = smallest / 2 + free * part / 4;
      try {
        const Plan p = plan(c.trace, c.bundles, c.policy);
        EXPECT_LE(p.report.bytes, c.policy.slot_bytes);
        ASSERT_EQ(check_plan(p, c.trace, c.bundles, c.policy).value_or("sound"), "sound");
        squeezed += p.report.bytes < free;
      } catch (const Error& e) {
        ++refused;
        EXPECT_LT(c.policy.slot_bytes, smallest) << "seed " << seed << ": " << e.what();
      }
    }
  }
  EXPECT_GT(refused, 100);
  EXPECT_GT(squeezed, 100);
}

// check_plan finds what a broken planner would do.
TEST(Plan, CheckFindsBrokenPlans) {
  const auto trace = TraceMaker(1e5f)
                         .fwd(0)
                         .fwd(1)
                         .fwd(2)
                         .bwd(2)
                         .wgrad(2)
                         .bwd(1)
                         .wgrad(1)
                         .wgrad(0)
                         .wgrad(1)
                         .flush();
  const std::vector<BundleSpec> bundles = chain_of(3);
  const Policy policy{.keep_span = 1};
  const Plan good = checked(trace, bundles, policy);
  const auto fault = [&](auto&& change) {
    Plan p = good;
    change(p);
    return check_plan(p, trace, bundles, policy).value_or("sound").substr(0, 3);
  };
  EXPECT_EQ(fault([](Plan& p) { std::swap(p.waits.items[0], p.waits.items[1]); }), "I1:");
  EXPECT_EQ(fault([](Plan& p) { p.gathers[1].last_use = 9; }), "I1:");
  EXPECT_EQ(fault([](Plan& p) { p.gathers[0].payload = Payload::kCol; }), "I1:");
  EXPECT_EQ(fault([](Plan& p) { p.gathers[1].issue = 2; }), "I2:");
  EXPECT_EQ(fault([](Plan& p) { p.gathers[1].slot = p.gathers[0].slot; }), "I3:");
  EXPECT_EQ(fault([](Plan& p) { p.gathers[0].publishes = false; }), "I5:");
  EXPECT_EQ(fault([](Plan& p) { p.reduce_at[6] = kNone; }), "I6:");
  EXPECT_EQ(fault([](Plan& p) { p.reduces[0].lane = p.gathers[0].lane; }), "I6:");
  EXPECT_EQ(fault([](Plan& p) { p.reduces[1].last = true; }), "I7:");
  EXPECT_EQ(fault([](Plan& p) { p.reduces[3].last = false; }), "I7:");
  EXPECT_EQ(fault([](Plan& p) { p.reduces[3].free = 99; }), "I8:");
  EXPECT_EQ(fault([](Plan& p) {
              for (Gather& g : p.gathers) g.read_event = kNone;
            }),
            "I9:");
  EXPECT_EQ(fault([](Plan& p) { p.gathers[2].ready_event = p.events; }), "I9:");
  EXPECT_EQ(fault([](Plan& p) { p.slots.push_back(p.slots[p.gathers[0].slot]); }), "I3:");
}

}  // namespace
}  // namespace moiety::gtp
