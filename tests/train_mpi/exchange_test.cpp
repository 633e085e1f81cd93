// Processes that train with every way in which tokens may travel: losses and norms are the same
// bits.
#include "tests/data/data_helpers.h"
#include "tests/support/mpi/world.h"
#include "tests/train/exchange_cases.h"

namespace moiety::train {
namespace {

TEST(Exchange, LossesOfProcessesAreTheSameBits) {
  comm::Communicator& world = comm::testing::world();
  const TemporaryDirectory dir;
  const std::vector<std::string> dirs = world.bootstrap().all_gather(dir / "r");
  std::vector<double> expected;
  std::vector<ExchangeCase> cases = exchange_cases();
  if (world.size() > 2) cases.resize(3);  // more processes than cores take their time
  for (const ExchangeCase& x : cases) {
    TrainConfig config =
        exchange_config(dirs[0] + x.describe(), world.size(), moe::Reduction::kToken);
    set(config, x);
    const std::vector<double> losses = losses_of(config, world);
    if (expected.empty()) expected = losses;
    EXPECT_EQ(losses, expected) << x.describe();
  }
  EXPECT_EQ(expected.size(), world.rank() == 0 ? 2u * 4 + 3 : 0u);
}

}  // namespace
}  // namespace moiety::train
