// What the parent of ranks that are processes makes of their ends, and how they know their place.
// tests/comm_mpi runs the whole of it (--ranks=3), tests/apps/faults.py with the program.
#include "moiety/comm/local_group.h"

#include <gtest/gtest.h>

#include "moiety/comm/local/started.h"
#include "tests/support/error_of.h"

namespace moiety::comm {
namespace {

RankEnd end_of(int rank, int code, int signal = 0, std::string text = "") {
  RankEnd out;
  out.rank = rank;
  out.pid = 4711 + rank;
  out.code = code;
  out.signal = signal;
  out.text = std::move(text);
  return out;
}

TEST(LocalGroup, TheFirstFailureCounts) {
  const StartOptions options{.arguments = {}, .good_codes = {0, 75}};
  EXPECT_EQ(first_failure({end_of(0, 0), end_of(1, 75)}, options), nullptr);
  const std::vector<RankEnd> thrown{end_of(2, 75), end_of(1, 3, 0, "t.tok is cut"),
                                    end_of(0, 7, 0, "rank 1 failed")};
  EXPECT_EQ(first_failure(thrown, options)->rank, 1);
  EXPECT_EQ(failure_text(thrown[1], thrown), "t.tok is cut");
  EXPECT_EQ(failure_text(end_of(1, 9), thrown), "rank 1 (pid 4712) has ended with exit code 9");
}

// A survivor may be quicker to end than the parent is to see the death.
TEST(LocalGroup, ADeathCountsBeforeWhatSurvivorsSay) {
  const StartOptions options;
  std::vector<RankEnd> ends{end_of(1, 7, 0, "rank 0 (process 4711) has ended"), end_of(0, 0, 9)};
  const RankEnd* failure = first_failure(ends, options);
  EXPECT_EQ(failure->rank, 0);
  EXPECT_EQ(
      failure_text(*failure, ends),
      "rank 0 (pid 4711) is gone (signal 9, Killed); rank 1: rank 0 (process 4711) has ended");
  EXPECT_EQ(failure_text(*failure, {ends[1]}), "rank 0 (pid 4711) is gone (signal 9, Killed)");
  // What the parent has killed has not failed.
  ends[1].killed = true;
  EXPECT_EQ(first_failure(ends, options)->rank, 1);
}

TEST(LocalGroup, ARankReadsItsPlace) {
  EXPECT_FALSE(is_started_rank());
  EXPECT_FALSE(report_failure("nobody hears it"));
  const local::Started place{.rank = 1, .report = 9, .sockets = {5, -1, 7}};
  EXPECT_EQ(local::to_text(place), "1/3:9:5,-1,7,");
  const local::Started read = local::from_text("1/3:9:5,-1,7,");
  EXPECT_EQ(read.rank, 1);
  EXPECT_EQ(read.report, 9);
  EXPECT_EQ(read.sockets, place.sockets);
  for (const char* wrong :
       {"", "1", "3/3:9:5,-1,7,", "-1/3:9:5,-1,7,", "1/3:9:5,-1,", "1/3:9:5,x,"}) {
    const std::string error = error_of([&] { local::from_text(wrong); }, ErrorKind::kUsage);
    EXPECT_EQ(error.find("MOIETY_STARTED_RANK = "), 0u) << wrong << ": " << error;
  }
}

TEST(LocalGroup, RanksAreCounted) {
  EXPECT_EQ(error_of([] { start_ranks(0, {}); }), "start_ranks: 0 ranks, 1 to 1024 are possible");
}

}  // namespace
}  // namespace moiety::comm
