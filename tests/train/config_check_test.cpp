#include "moiety/train/config_check.h"

#include <gtest/gtest.h>

#include "tests/support/error_of.h"

namespace moiety::train {
namespace {

TEST(ConfigCheck, LengthOfTheRun) {
  TrainConfig c;
  EXPECT_EQ(total_steps(c), 1000);
  c.train.steps = 7;
  EXPECT_EQ(total_steps(c), 7);
  c.train.steps = 0;
  c.train.tokens = 8 * 1024 * 3 + 1;
  EXPECT_EQ(total_steps(c), 4);
}

TEST(ConfigCheck, ARunHasADirectory) {
  const TrainConfig c;
  EXPECT_EQ(error_of([&] { check_training(c, check_layout(c)); }, ErrorKind::kUsage),
            "run.dir = \"\": a run needs a directory");
}

TEST(ConfigCheck, StepsAreCapturedOnAGpuAlone) {
  TrainConfig c;
  const Device gpu{DeviceType::kCuda, 0};
  check_graph(c, {});
  c.train.cuda_graph = true;
  EXPECT_EQ(error_of([&] { check_graph(c, {}); }, ErrorKind::kUsage),
            "train.cuda_graph = \"true\", but the run is on the CPU");
  check_graph(c, gpu);
  c.guard.nan = optim::NanGuard::kTensor;
  EXPECT_EQ(error_of([&] { check_graph(c, gpu); }, ErrorKind::kUsage),
            "train.cuda_graph = \"true\": guard.nan = \"tensor\" looks at single operations");
}

}  // namespace
}  // namespace moiety::train
