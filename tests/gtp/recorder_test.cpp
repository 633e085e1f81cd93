// Recording, and the comparison of what ranks recorded.
#include "moiety/gtp/recorder.h"

#include <gtest/gtest.h>

#include "moiety/base/error.h"
#include "moiety/comm/thread_group.h"
#include "tests/gtp/traces.h"
#include "tests/support/error_of.h"

namespace moiety::gtp {
namespace {

constexpr BundleId kZero[] = {0}, kOne[] = {1}, kPair[] = {0, 1};

Policy simple_rates() {
  Policy p;
  p.flops_per_ns = 100;
  p.memory_bytes_per_ns = 10;
  return p;
}

TEST(Recorder, RecordsCallsWithTheirWork) {
  Recorder r(simple_rates());
  r.begin();
  r.note_work({.flops = 100, .bytes = 0});
  r.call(Kind::kFwd, kZero, {.flops = 1000, .bytes = 50});  // 10 and 5 ns
  r.note_work({.flops = 0, .bytes = 30});
  r.call(Kind::kFwd, kPair, {.flops = 0, .bytes = 70});
  r.call(Kind::kCut, {});
  r.call(Kind::kBwd, kOne);
  r.call(Kind::kGradBuffer, kOne);
  r.call(Kind::kGrad, kOne);
  const std::vector<TraceEvent> expected{{Kind::kBegin, kNoBundle, false, 1},
                                         {Kind::kFwd, 0, false, 13},
                                         {Kind::kFwd, 0, false, 0},
                                         {Kind::kFwd, 1, true, 7},
                                         {Kind::kCut},
                                         {Kind::kBwd, 1},
                                         {Kind::kGradBuffer, 1},
                                         {Kind::kGrad, 1},
                                         {Kind::kFlush}};
  const auto sealed = r.seal();
  EXPECT_EQ(std::vector<TraceEvent>(sealed.begin(), sealed.end()), expected);
  check_trace(sealed, 2);
  // The next step drops it.
  r.begin();
  EXPECT_EQ(r.seal().size(), 2u);
}

TEST(Recorder, GoesOnFromADeparture) {
  const auto planned = TraceMaker(5).fwd(0).fwd(1).fwd(0).flush();
  Recorder r(simple_rates());
  r.begin(std::span(planned).first(3));
  r.call(Kind::kBwd, kOne);
  EXPECT_EQ(r.seal().size(), 5u);
  r.begin(std::span(planned).first(3));
  r.call(Kind::kFwd, kZero, {.flops = 500, .bytes = 0});
  const auto sealed = r.seal();
  EXPECT_EQ(std::vector<TraceEvent>(sealed.begin(), sealed.end()), planned);
}

TEST(Recorder, RefusesCallsOutsideOfAStep) {
  Recorder r({});
  EXPECT_EQ(error_of([&] { r.call(Kind::kFwd, kZero); }),
            "gtp recorder: forward outside of a step");
  EXPECT_EQ(error_of([&] { r.note_work({}); }), "gtp recorder: work outside of a step");
  EXPECT_EQ(error_of([&] { r.seal(); }), "gtp recorder: flush outside of a step");
  r.begin();
  EXPECT_EQ(error_of([&] { r.call(Kind::kGrad, kPair); }), "gtp recorder: grad of 2 bundles");
  EXPECT_EQ(error_of([&] { r.call(Kind::kFwd, {}); }), "gtp recorder: forward of 0 bundles");
  EXPECT_EQ(error_of([&] { r.call(Kind::kBegin, {}); }), "gtp recorder: begin of 0 bundles");
  r.seal();
  EXPECT_EQ(error_of([&] { r.call(Kind::kFwd, kZero); }),
            "gtp recorder: forward outside of a step");
}

// The errors of compare_traces on all ranks, if rank r has trace_of(r).
template <class TraceOf>
std::vector<std::string> errors_of(int ranks, TraceOf&& trace_of) {
  std::vector<std::string> errors(ranks);
  comm::run_thread_ranks(ranks, {}, [&](comm::Communicator& world) {
    const std::vector<TraceEvent> trace = trace_of(world.rank());
    errors[world.rank()] = error_of([&] { compare_traces(world.bootstrap(), "train", trace); });
  });
  return errors;
}

std::vector<TraceEvent> long_trace(int calls) {
  TraceMaker maker(1000);
  for (int i = 0; i < calls; ++i) maker.fwd(i % 7);
  return maker.flush();
}

TEST(CompareTraces, AgreesOnEqualOnes) {
  for (const int ranks : {1, 3}) {
    for (const auto& error : errors_of(ranks, [](int) { return long_trace(1000); })) {
      EXPECT_EQ(error, "no error");
    }
  }
}

TEST(CompareTraces, NamesTheFirstDifferenceOnEveryRank) {
  const auto errors = errors_of(4, [](int rank) {
    auto trace = long_trace(1000);
    if (rank == 2) trace[300].kind = Kind::kBwd;
    if (rank == 3) trace[900].bundle = 0;
    return trace;
  });
  for (const auto& error : errors) {
    EXPECT_EQ(error,
              "gtp: the traces of step train differ in events 256 to 511: event 300 is forward of "
              "bundle 5, 1000 ns on rank 0, backward of bundle 5, 1000 ns on rank 2");
  }
}

TEST(CompareTraces, WorkCounts) {
  const auto errors = errors_of(2, [](int rank) {
    auto trace = long_trace(3);
    trace[1].work_ns += static_cast<float>(rank);
    return trace;
  });
  EXPECT_EQ(errors[1],
            "gtp: the traces of step train differ in events 0 to 255: event 1 is forward of bundle "
            "0, 1000 ns on rank 0, forward of bundle 0, 1001 ns on rank 1");
}

TEST(CompareTraces, OneThatEndsEarlier) {
  for (const int calls : {254, 255, 256, 510, 600}) {  // with begin and flush: full blocks too
    const auto errors = errors_of(2, [&](int rank) {
      auto trace = long_trace(calls);
      if (rank == 1) trace.push_back(trace[1]);
      return trace;
    });
    const int event = calls + 2;
    EXPECT_EQ(errors[0], text("gtp: the traces of step train differ in events {} to {}: event {} "
                              "is nothing on rank 0, forward of bundle 0, 1000 ns on rank 1",
                              event / 256 * 256, event / 256 * 256 + 255, event));
    EXPECT_EQ(errors[1], errors[0]);
  }
}

TEST(AgreePolicy, IsThatOfRankZero) {
  comm::run_thread_ranks(3, {}, [&](comm::Communicator& world) {
    Policy mine;
    mine.keep_span = 10 + world.rank();
    mine.slot_bytes = world.rank();
    const Policy agreed = agree_policy(world.bootstrap(), mine);
    MOIETY_CHECK(agreed.keep_span == 10 && agreed.slot_bytes == 0 && agreed.slack == mine.slack,
                 "rank {} has keep_span {}", world.rank(), agreed.keep_span);
  });
}

}  // namespace
}  // namespace moiety::gtp
