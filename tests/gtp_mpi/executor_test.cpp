// The executor among processes, over every transport: the bits of the reference, on a ring those of
// its own order, and the same whether steps are planned or not.
#include "moiety/comm/symmetric_buffer.h"
#include "tests/gtp/executor_cases.h"
#include "tests/support/mpi/world.h"

namespace moiety::gtp {
namespace {

class ExecutorProcesses : public ::testing::TestWithParam<TransportKind> {
 protected:
  void SetUp() override {
    if (GetParam() == TransportKind::kMapped && !comm::mappable(comm::testing::world())) {
      GTEST_SKIP() << "told not to map";
    }
  }
  TrainingSetup setup(int egtp, Pace pace) const {
    TrainingSetup out = setup_of(comm::testing::world().size(), egtp, pace);
    out.transport = GetParam();
    out.poison = GetParam() == TransportKind::kMapped;
    return out;
  }
  void run(const TrainingSetup& setup, const std::function<void(Rank&)>& body) const {
    comm::testing::MpiBackend::run(
        setup.ranks, Seconds(60), [&](comm::Communicator& world) { run_rank(world, setup, body); });
  }
  std::vector<int> expert_groups() const {
    const int ranks = comm::testing::world().size();
    return ranks == 4 ? std::vector{4, 2} : std::vector{ranks};
  }
};

// Every view and every gradient is the reference's, or within the bound of a ring.
TEST_P(ExecutorProcesses, GatherWeightsAndReduceGradients) {
  for (const int egtp : expert_groups()) {
    for (const Pace pace : {Pace::kLazy, Pace::kLanes}) {
      run(setup(egtp, pace), [](Rank& rank) { three_steps(rank, programs()); });
    }
  }
}

TEST_P(ExecutorProcesses, ReduceTheSameOnDemandAndAsPlanned) {
  for (const DType main : {DType::kFloat32, DType::kBFloat16}) {
    TrainingSetup s = setup(expert_groups().back(), Pace::kLazy);
    s.same_gradients = true;
    for (BundleCase& b : s.bundles) b.main = main;
    run(s, [](Rank& rank) {
      for (const Named& p : programs()) {
        std::string on_demand;
        for (int i = 0; i < 3; ++i) {
          rank.step({p.name, 1}, p.program);
          rank.synchronize();
          EXPECT_EQ(rank.executor().counts().step.planned, i > 0) << p.name;
          if (i == 0) on_demand = rank.gradient_bytes();
          EXPECT_TRUE(rank.gradient_bytes() == on_demand) << p.name << ", step " << i;
        }
      }
    });
  }
}

// Weights in every format, with column views that travel and that are made.
TEST_P(ExecutorProcesses, GatherWeightsInFormats) {
  for (const CodecCase& c : codec_cases()) {
    TrainingSetup s = setup(expert_groups().back(), Pace::kLazy);
    const int64_t a = c.codec.align();
    s.bundles = {
        {.name = "dense", .rows = a * s.ranks - a / 2 + 1, .cols = 48, .codec = c.codec},
        {.name = "experts", .rows = a * s.egtp, .cols = 96, .experts = 2, .codec = c.codec}};
    TraceMaker maker(20000);
    maker.fwd(0).fwd(1).again(1).bwd(1).wgrad(1).bwd(0).wgrad(0);
    run(s, [&](Rank& rank) { three_steps(rank, {{"train", program_of(maker)}}); });
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, ExecutorProcesses,
                         ::testing::Values(TransportKind::kMapped, TransportKind::kAllToAll,
                                           TransportKind::kRing),
                         [](const auto& param) { return std::string(name(param.param)); });

}  // namespace
}  // namespace moiety::gtp
