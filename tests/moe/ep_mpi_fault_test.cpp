// Faults in expert parallelism among processes: tests_moe_fault by itself and under mpirun, and what
// its survivors say. Rank 2 is the one that fails.
#include <tuple>
#include <vector>

#include "tests/support/mpi/faults.h"

namespace moiety::moe {
namespace {

constexpr const char* kProgram = "tests_moe_fault";

struct Fault {
  std::string scenario, transport;
  std::map<int, std::vector<std::string>> texts;  // by rank: it ends with one of these
  double bound = 1;                               // seconds since the fault
};

class EpMpiFault : public ::testing::TestWithParam<std::tuple<testing::Launcher, Fault>> {};

TEST_P(EpMpiFault, IsNamedByEverySurvivor) {
  const auto& [launcher, fault] = GetParam();
  if (!testing::can_run(launcher)) GTEST_SKIP() << "no mpirun, or built without MPI";
  std::string output;
  const auto said =
      testing::run_fault(launcher, kProgram, fault.scenario + " " + fault.transport, &output);
  ASSERT_EQ(said.size(), fault.texts.size()) << output;
  bool first_hand = false;
  for (const auto& [rank, expected] : fault.texts) {
    ASSERT_TRUE(said.contains(rank)) << output;
    bool found = false;
    for (size_t i = 0; i < expected.size(); ++i) {
      if (said.at(rank).text != expected[i]) continue;
      found = true;
      first_hand = first_hand || i == 0 || expected[i].find("stopped") == std::string::npos;
    }
    EXPECT_TRUE(found) << "rank " << rank << " said: " << said.at(rank).text;
    EXPECT_LT(said.at(rank).seconds, fault.bound) << output;
  }
  EXPECT_TRUE(first_hand) << output;
}

constexpr const char *kMapped = "mapped", *kCollectives = "collectives";
constexpr double kStall = 3;  // seconds that a stalled rank is away for: its own error comes then

// The first words of the rank that noticed, then the words that others may have got from it.
std::vector<std::string> stopped(const std::string& first, const std::string& verb, int epoch = 2) {
  std::vector<std::string> out{first};
  for (const int origin : {0, 1, 2}) {
    for (const int about : {0, 1, 2}) {
      out.push_back(text("ep, group \"moe\", epoch {}: stopped by rank {}, which {} rank {}", epoch,
                         origin, verb, about));
    }
  }
  return out;
}

std::vector<std::string> late(int rank) {
  return stopped(text("ep dispatch, group \"moe\", epoch 2: rank {} waited 2.0 s for rank 2, chunk "
                      "1 of 1 (word at 0); rank 2 last seen in prepare, 1",
                      rank),
                 "waited for");
}

const std::string kDispatches = "dispatch(bf16, 40 B) of plan 1",
                  kCombines = "combine(bf16, 40 B, kRank) of plan 1";
std::string runs(int me, const std::string& mine, int peer, const std::string& its) {
  return text("ep, group \"moe\", epoch 2: rank {} runs {}, rank {} runs {}", me, mine, peer, its);
}
// Rank 2 runs `its`, the others `ours`: what any rank says of that.
std::vector<std::string> another(const std::string& ours, const std::string& its) {
  std::vector<std::string> out;
  for (const int other : {0, 1}) {
    out.push_back(runs(other, ours, 2, its));
    out.push_back(runs(2, its, other, ours));
  }
  return out;
}

const std::string kOperation =
    "ep dispatch, group \"moe\", epoch 2: communicator \"moe\", "
    "operation 4: ";
const std::string kLast = "; last together in prepare, 1";
std::string waited(int rank) {
  return text(
      "communicator \"moe\", operation 4: rank {} waited 2.0 s in all_to_all(uint8[32]) "
      "for rank 2",
      rank);
}
// One rank gives up and the others hear of it, unless they give up at the same time.
std::vector<std::string> late_collective(int rank) {
  const std::string where = "ep dispatch, group \"moe\", epoch 2: ";
  std::vector<std::string> out{where + waited(rank) + kLast};
  for (const int origin : {0, 1}) {
    out.push_back(kOperation + "all_to_all(uint8[32]) stopped: rank " + std::to_string(origin) +
                  " failed: " + waited(origin) + kLast);
  }
  if (rank == 2) out.erase(out.begin());
  return out;
}

const std::string kAlignment =
    "ep prepare, group \"moe\", epoch 2: alignment differs: rank 0 has 1, rank 2 has 4";
// Or what a rank hears that still gathered when another one had seen it.
std::vector<std::string> misaligned() {
  std::vector<std::string> out{kAlignment};
  for (const int origin : {0, 1, 2}) {
    const std::string heard = text(
        "ep prepare, group \"moe\", epoch 2: communicator \"moe\", operation 5: "
        "all_gather(uint8[256]) stopped: rank {} failed: {}",
        origin, kAlignment);
    out.push_back(heard);
    out.push_back(heard + kLast);
  }
  return out;
}
const std::vector<std::string> kDiffers = stopped(kAlignment, "whose prepare differs from that of");

std::vector<std::string> ended(const std::string& operation, int rank, int epoch,
                               const std::string& why) {
  return {text("ep {}, group \"moe\", epoch {}: rank {} stopped: {}", operation, epoch, rank, why)};
}
std::vector<std::string> ended_collective(const std::string& operation, int epoch, int number,
                                          const std::string& why, const std::string& last) {
  return {
      text("ep {}, group \"moe\", epoch {}: communicator \"moe\", operation {}: "
           "all_to_all(uint8[32]) stopped: {}; last together in {}",
           operation, epoch, number, why, last)};
}
const std::string kEnded = "rank 2 has ended", kFull = "rank 2 failed: disk full";

INSTANTIATE_TEST_SUITE_P(
    Ep, EpMpiFault,
    ::testing::Combine(
        ::testing::Values(testing::Launcher::kOwn, testing::Launcher::kMpirun),
        ::testing::Values(
            Fault{"dies",
                  kMapped,
                  {{0, ended("dispatch", 0, 2, kEnded)}, {1, ended("dispatch", 1, 2, kEnded)}}},
            Fault{"dies_between",
                  kMapped,
                  {{0, ended("combine", 0, 43, kEnded)}, {1, ended("combine", 1, 43, kEnded)}}},
            Fault{"stalls", kMapped, {{0, late(0)}, {1, late(1)}, {2, late(2)}}, kStall + 0.5},
            Fault{"throws",
                  kMapped,
                  {{0, ended("dispatch", 0, 2, kFull)},
                   {1, ended("dispatch", 1, 2, kFull)},
                   {2, {"disk full"}}}},
            Fault{"runs_another_operation",
                  kMapped,
                  {{0, another(kDispatches, kCombines)},
                   {1, another(kDispatches, kCombines)},
                   {2, another(kDispatches, kCombines)}}},
            Fault{"prepares_otherwise", kMapped, {{0, kDiffers}, {1, kDiffers}, {2, kDiffers}}},
            Fault{"dies",
                  kCollectives,
                  {{0, ended_collective("dispatch", 2, 4, kEnded, "prepare, 1")},
                   {1, ended_collective("dispatch", 2, 4, kEnded, "prepare, 1")}}},
            Fault{"dies_between",
                  kCollectives,
                  {{0, ended_collective("combine", 43, 86, kEnded, "dispatch, 42")},
                   {1, ended_collective("combine", 43, 86, kEnded, "dispatch, 42")}}},
            Fault{"stalls",
                  kCollectives,
                  {{0, late_collective(0)}, {1, late_collective(1)}, {2, late_collective(2)}},
                  kStall + 0.5},
            Fault{"throws",
                  kCollectives,
                  {{0, ended_collective("dispatch", 2, 4, kFull, "prepare, 1")},
                   {1, ended_collective("dispatch", 2, 4, kFull, "prepare, 1")},
                   {2, {"disk full"}}}},
            Fault{"runs_another_operation",
                  kCollectives,
                  {{0, {runs(0, kDispatches, 2, kCombines)}},
                   {1, {runs(1, kDispatches, 2, kCombines)}},
                   {2, {runs(2, kCombines, 0, kDispatches)}}}},
            Fault{"prepares_otherwise",
                  kCollectives,
                  {{0, misaligned()}, {1, misaligned()}, {2, misaligned()}}})),
    [](const auto& info) {
      const Fault& fault = std::get<Fault>(info.param);
      return fault.scenario + "_" + fault.transport +
             (std::get<0>(info.param) == testing::Launcher::kOwn ? "" : "_under_mpirun");
    });

}  // namespace
}  // namespace moiety::moe
