// Transports among processes: the same bits as among threads.
#include "moiety/comm/symmetric_buffer.h"
#include "tests/gtp/transport_cases.h"
#include "tests/support/mpi/world.h"

namespace moiety::gtp {
namespace {

void run_processes(int ranks, const RankBody& body) {
  comm::testing::MpiBackend::run(ranks, Seconds(60), body);
}

class Processes : public ::testing::TestWithParam<TransportKind> {
 protected:
  void SetUp() override {
    if (GetParam() == TransportKind::kMapped && !comm::mappable(comm::testing::world())) {
      GTEST_SKIP() << "told not to map";
    }
  }
  int ranks() const { return comm::testing::world().size(); }
};

TEST_P(Processes, Gather) { expect_gathers(run_processes, ranks(), GetParam()); }
TEST_P(Processes, Reduce) { expect_reduces(run_processes, ranks(), GetParam()); }
TEST_P(Processes, ReduceOtherBundles) {
  expect_disagreements(run_processes, ranks(), GetParam(), GetParam() == TransportKind::kMapped);
}

INSTANTIATE_TEST_SUITE_P(Transport, Processes,
                         ::testing::Values(TransportKind::kMapped, TransportKind::kAllToAll,
                                           TransportKind::kRing),
                         [](const auto& param) { return std::string(name(param.param)); });

}  // namespace
}  // namespace moiety::gtp
