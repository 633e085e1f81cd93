// The conformance suite on processes. Every process computes the oracle that threads are compared
// with, so processes and threads are the same bits.
#include "tests/moe/ep_conformance.h"

#include "tests/moe/ep_quantized.h"
#include "tests/moe_mpi/processes.h"

namespace moiety::moe {
namespace {

TEST(EpConformance, ProcessesThatMapEachOther) {
  if (!MappedProcesses::available()) GTEST_SKIP() << "told not to map";
  conformance::run_cases<MappedProcesses>(0);
}

TEST(EpConformance, ProcessesOverCollectives) { conformance::run_cases<CollectiveProcesses>(1000); }

TEST(EpQuantized, ProcessesThatMapEachOther) {
  if (!MappedProcesses::available()) GTEST_SKIP() << "told not to map";
  quantized::run_cases<MappedProcesses>(0);
}

TEST(EpQuantized, ProcessesOverCollectives) { quantized::run_cases<CollectiveProcesses>(1000); }

TEST(EpTransport, IsChosenByWhatTheProcessesCan) {
  comm::Communicator& world = comm::testing::world();
  EpGroup group =
      EpGroup::create(world, ExpertMap(4, world.size()), {.tokens = 1, .model = 1, .topk = 1}, {});
  EXPECT_EQ(group.transport(),
            world.may_map_memory() ? EpTransport::kMapped : EpTransport::kCollectives);
  group.close();
}

}  // namespace
}  // namespace moiety::moe
