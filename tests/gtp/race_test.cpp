// The race checker: planned steps are sound, steps without one of their edges are not.
#include "moiety/gtp/race.h"

#include <gtest/gtest.h>

#include "tests/gtp/traces.h"

namespace moiety::gtp {
namespace {

constexpr int64_t kMiB = 1 << 20;
constexpr Edge kEdges[] = {Edge::kPublished,   Edge::kReady, Edge::kRead,    Edge::kGradient,
                           Edge::kAccumulated, Edge::kSent,  Edge::kFlushed, Edge::kBegun};

std::string race_of(const TraceCase& c, Edge without) {
  const Plan p = plan(c.trace, c.bundles, c.policy);
  const auto race = find_race(p, c.trace, {without, c.streams});
  if (!race) return "none";
  return "step " + std::to_string(race->step) + ", position " + std::to_string(race->position) +
         ": " + race->text;
}

TEST(Race, NoneInPlansOfRandomTraces) {
  int two_streams = 0;
  for (uint64_t seed = 0; seed < 10000; ++seed) {
    const TraceCase c = random_case(seed);
    ASSERT_EQ(race_of(c, Edge::kNone), "none") << "seed " << seed;
    for (const int32_t s : c.streams) two_streams += s == 1;
  }
  EXPECT_GT(two_streams, 1000);
}

TEST(Race, EachEdgeIsMissedOnRandomTraces) {
  for (const Edge edge : kEdges) {
    int found = 0;
    for (uint64_t seed = 0; seed < 200; ++seed) found += race_of(random_case(seed), edge) != "none";
    EXPECT_GT(found, edge == Edge::kBegun ? 2 : 20) << "edge " << static_cast<int>(edge);
  }
}

// The purpose of each edge, on the smallest traces.
TEST(Race, EachEdgeIsMissedOnANamedTrace) {
  TraceCase c;
  for (int i = 0; i < 3; ++i) c.bundles.push_back(bundle_of("w", kMiB));
  c.trace = TraceMaker(1e5f).fwd(0).bwd(0).wgrad(0).flush();
  EXPECT_EQ(race_of(c, Edge::kPublished),
            "step 0, position 0: the shard of bundle 0 is read before it is written");
  EXPECT_EQ(race_of(c, Edge::kReady),
            "step 0, position 1: the slot of bundle 0 is read before it is written");
  EXPECT_EQ(race_of(c, Edge::kGradient),
            "step 0, position 4: the send slot, by a peer, of bundle 0 is read before it is "
            "written");
  EXPECT_EQ(race_of(c, Edge::kAccumulated),
            "step 0, position 4: main_grad of bundle 0 is read before it is written");
  EXPECT_EQ(race_of(c, Edge::kFlushed),
            "step 0, position 5: a shard of bundle 0 is overwritten before it is read");
  // Two gathers share a slot.
  c.trace = TraceMaker(1e5f).fwd(0).fwd(1).fwd(2).flush();
  EXPECT_EQ(race_of(c, Edge::kRead),
            "step 0, position 2: the slot of bundle 2 is overwritten before it is read");
  // Without gradients no optimizer comes between two steps.
  EXPECT_EQ(race_of(c, Edge::kBegun),
            "step 1, position 0: the slot of bundle 0 is overwritten before it is read");
  // Two gradients share a send slot.
  c.trace = TraceMaker(1e5f).fwd(0).fwd(1).wgrad(0).wgrad(1).fwd(0).flush();
  c.policy.send_bytes = 0;
  EXPECT_EQ(race_of(c, Edge::kSent),
            "step 0, position 5: the send slot of bundle 1 is overwritten before it is read");
}

// Rows are read where they lie: the shard is what an edge protects, at this rank and at its peers.
TEST(Race, RowsNeedTheShard) {
  TraceCase c;
  c.bundles.push_back(bundle_of("w", kMiB));
  c.bundles[0].rows = {.tokens = 9, .lookup = 1000, .reduce = {3000, 5000, 700}};
  c.trace = TraceMaker(1e5f).call(Kind::kRows, 0).call(Kind::kRowsGrad, 0).flush();
  EXPECT_EQ(race_of(c, Edge::kPublished),
            "step 0, position 1: the shard, by rows, of bundle 0 is read before it is written");
  EXPECT_EQ(race_of(c, Edge::kGradient),
            "step 0, position 2: the send slot, by a peer, of bundle 0 is read before it is "
            "written");
  EXPECT_EQ(race_of(c, Edge::kAccumulated),
            "step 0, position 2: main_grad of bundle 0 is read before it is written");
  EXPECT_EQ(race_of(c, Edge::kFlushed),
            "step 0, position 3: a shard of bundle 0 is overwritten before it is read");
  for (const Edge edge : {Edge::kNone, Edge::kReady, Edge::kRead, Edge::kSent, Edge::kBegun}) {
    EXPECT_EQ(race_of(c, edge), "none");
  }
  // Two gradients of rows share a send slot; one of the whole table has its own.
  TraceMaker maker(1e5f);
  maker.call(Kind::kRowsGrad, 0).wgrad(0).call(Kind::kRowsGrad, 0);
  c.trace = maker.flush();
  c.policy.send_bytes = 0;
  EXPECT_EQ(race_of(c, Edge::kNone), "none");
  EXPECT_EQ(race_of(c, Edge::kSent),
            "step 0, position 4: the send slot of bundle 0 is overwritten before it is read");
}

TEST(Race, NoneInPlansOfRandomTracesWithRows) {
  int64_t rows = 0, gradients = 0;
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    Random random(seed);
    const TraceCase c = by_rows(random_case(seed), 0, random);
    ASSERT_EQ(race_of(c, Edge::kNone), "none") << "seed " << seed;
    for (const TraceEvent& e : c.trace) {
      rows += e.kind == Kind::kRows;
      gradients += e.kind == Kind::kRowsGrad;
    }
  }
  EXPECT_GT(rows, 1000);
  EXPECT_GT(gradients, 1000);
}

// With G = 1 the consumers read shards, and the gradient's GEMM writes main_grad.
TEST(Race, GroupsOfOneNeedTheShardAndTheReport) {
  TraceCase c;
  c.bundles.push_back(bundle_of("w", kMiB, 1));
  c.trace = TraceMaker(1e5f).fwd(0).wgrad(0).fwd(0).flush();
  EXPECT_EQ(race_of(c, Edge::kPublished),
            "step 0, position 1: the shard of bundle 0 is read before it is written");
  EXPECT_EQ(race_of(c, Edge::kAccumulated),
            "step 0, position 3: main_grad of bundle 0 is read before it is written");
  EXPECT_EQ(race_of(c, Edge::kFlushed),
            "step 0, position 5: a shard of bundle 0 is overwritten before it is read");
  for (const Edge edge : {Edge::kReady, Edge::kRead, Edge::kGradient, Edge::kSent, Edge::kBegun}) {
    EXPECT_EQ(race_of(c, edge), "none");
  }
  // Two streams add to main_grad.
  TraceMaker maker(1e5f);
  c.trace = maker.on(0).fwd(0).on(1).fwd(0).on(0).wgrad(0).on(1).wgrad(0).flush();
  c.streams = maker.streams();
  EXPECT_EQ(race_of(c, Edge::kNone), "none");
  EXPECT_EQ(race_of(c, Edge::kSent),
            "step 0, position 5: main_grad of bundle 0 is overwritten before it is written");
}

// An event that stays within a graph orders nothing in the next one.
TEST(Race, InternalEventsEndWithTheirSegment) {
  TraceCase c;
  for (int i = 0; i < 4; ++i) c.bundles.push_back(bundle_of("w", kMiB));
  c.trace = TraceMaker(1e5f).fwd(0).fwd(1).cut().fwd(2).fwd(3).flush();
  Plan p = plan(c.trace, c.bundles, c.policy);
  ASSERT_LT(p.external, p.events);
  EXPECT_FALSE(find_race(p, c.trace).has_value());
  p.external = p.events;
  const auto race = find_race(p, c.trace);
  ASSERT_TRUE(race.has_value());
  EXPECT_EQ(race->position, 4);
}

// A gather that two streams read: the next one into its slot waits for both.
TEST(Race, ReadersOnTwoStreams) {
  TraceCase c;
  for (int i = 0; i < 4; ++i) c.bundles.push_back(bundle_of("w", kMiB));
  TraceMaker maker(1e5f);
  c.trace = maker.on(1).fwd(0).on(0).fwd(0).fwd(1).fwd(2).flush();
  c.streams = maker.streams();
  EXPECT_EQ(race_of(c, Edge::kNone), "none");
  Plan p = plan(c.trace, c.bundles, c.policy);
  ASSERT_EQ(p.gathers[0].last_use, 2);
  EXPECT_NE(race_of(c, Edge::kRead), "none");
}

}  // namespace
}  // namespace moiety::gtp
