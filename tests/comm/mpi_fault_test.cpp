// Faults among processes: tests_comm_fault by itself and under mpirun, and what its survivors say.
#include <algorithm>
#include <map>
#include <string>
#include <tuple>

#include <gtest/gtest.h>

#include "tests/support/mpi/faults.h"

namespace moiety::comm {
namespace {

using moiety::testing::can_run;
using moiety::testing::Launcher;
using moiety::testing::run_fault;
using moiety::testing::Said;

constexpr const char* kProgram = "tests_comm_fault";

struct Fault {
  std::string scenario;
  std::map<int, std::string> texts;  // by rank: it ends with what it says
  double bound = 1.0;                // seconds since the fault
};

class MpiFault : public ::testing::TestWithParam<std::tuple<Launcher, Fault>> {};

TEST_P(MpiFault, IsNamedByEverySurvivor) {
  const auto& [launcher, fault] = GetParam();
  if (!can_run(launcher)) GTEST_SKIP() << "no mpirun, or built without MPI";
  std::string output;
  const std::map<int, Said> said = run_fault(launcher, kProgram, fault.scenario, &output);
  ASSERT_EQ(said.size(), fault.texts.size()) << output;
  for (const auto& [rank, expected] : fault.texts) {
    ASSERT_TRUE(said.contains(rank)) << output;
    const std::string& text = said.at(rank).text;
    EXPECT_TRUE(text.ends_with(expected)) << "rank " << rank << " said: " << text;
    EXPECT_LT(said.at(rank).seconds, fault.bound) << output;
  }
}

const std::string kAllReduce = "communicator \"world\", operation 2: all_reduce(float32[16], sum)";
const std::string kDead = " stopped: rank 2 has ended";
const std::string kDifference =
    "communicator \"world\", operation 2: rank 0 runs all_reduce(float32[16], sum), rank 2 runs "
    "broadcast(float32[18], root 2)";
const std::string kRows =
    "communicator \"world\", operation 2: all_to_all: rank 1 sends 1 rows to rank 2, which expects "
    "3";

INSTANTIATE_TEST_SUITE_P(
    Comm, MpiFault,
    ::testing::Combine(
        ::testing::Values(Launcher::kOwn, Launcher::kMpirun),
        ::testing::Values(
            Fault{"dies", {{0, kAllReduce + kDead}, {1, kAllReduce + kDead}}},
            Fault{"dies --no-map", {{0, kAllReduce + kDead}, {1, kAllReduce + kDead}}},
            Fault{"dies_in_bootstrap",
                  {{0, "bootstrap of \"world\": rank 0" + kDead},
                   {1, "bootstrap of \"world\": rank 1" + kDead}}},
            Fault{"dies_while_sending", {{0, kDead}, {1, kDead}}},
            Fault{
                "dies_in_barrier",
                {{0,
                  "barrier \"moe\", epoch 1: rank 0 stopped waiting for rank 2: rank 2 has ended"},
                 {1,
                  "barrier \"moe\", epoch 1: rank 1 stopped waiting for rank 2: rank 2 has "
                  "ended"}}},
            Fault{"exits", {{0, kDead}, {1, kDead}}},
            // One gives up at its deadline of 2 s, and the others hear of it; the stalled one when it
            // comes back, 3 s late.
            Fault{"stalls",
                  {{0, "waited 2.0 s in all_reduce(float32[16], sum) for rank 2"},
                   {1, "waited 2.0 s in all_reduce(float32[16], sum) for rank 2"},
                   {2, "waited 2.0 s in all_reduce(float32[16], sum) for rank 2"}},
                  4.0},
            Fault{"throws",
                  {{0, kAllReduce + " stopped: rank 2 failed: disk full"},
                   {1, "bootstrap of \"world\": rank 1 stopped: rank 2 failed: disk full"},
                   {2, "disk full"}}},
            Fault{"throws_to_busy_ranks",
                  {{0, "rank 2 failed: disk full"},
                   {1, "rank 2 failed: disk full"},
                   {2, "disk full"}}},
            Fault{"throws_to_busy_ranks --no-map",
                  {{0, "rank 2 failed: disk full"},
                   {1, "rank 2 failed: disk full"},
                   {2, "disk full"}}},
            Fault{"runs_another_operation", {{0, kDifference}, {1, kDifference}, {2, kDifference}}},
            Fault{"expects_other_rows", {{0, kRows}, {1, kRows}, {2, kRows}}},
            Fault{"ends_well", {}})),
    [](const auto& info) {
      std::string name = std::get<1>(info.param).scenario;
      std::erase(name, '-');
      std::replace(name.begin(), name.end(), ' ', '_');
      return name + (std::get<0>(info.param) == Launcher::kOwn ? "" : "_under_mpirun");
    });

// A rank that comes back from its work before its peers had what they need of it.
class MpiFaults : public ::testing::TestWithParam<Launcher> {};

TEST_P(MpiFaults, ARankThatEndsEarly) {
  if (!can_run(GetParam())) GTEST_SKIP() << "no mpirun, or built without MPI";
  std::string output;
  const std::map<int, Said> said = run_fault(GetParam(), kProgram, "ends_early", &output);
  ASSERT_EQ(said.size(), 3u) << output;
  for (const auto& [rank, what] : said) {
    // Chance decides which rank gives up first.
    EXPECT_NE(what.text.find(" waited 2.0 s "), std::string::npos) << what.text;
    EXPECT_LT(what.seconds, 3.0);
  }
}

INSTANTIATE_TEST_SUITE_P(Comm, MpiFaults, ::testing::Values(Launcher::kOwn, Launcher::kMpirun));

}  // namespace
}  // namespace moiety::comm
