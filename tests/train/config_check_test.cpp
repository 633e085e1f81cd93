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

TEST(ConfigCheck, GpusTakeDataTensorAndExpertParallelRanks) {
  const Device gpu{DeviceType::kCuda, 0};
  const Grid grid{.tp = 2, .dp = 3, .ep = 2, .edp = 3};
  check_gpu_layout(grid, gpu);
  EXPECT_FALSE(refusal_of_gpus(grid));
  struct Case {
    Grid grid;
    const char* text;
  };
  const char* rest =
      " on CPU ranks alone; on GPUs ranks take parallel.dp, parallel.tp and parallel.ep";
  for (const Case& c :
       {Case{{.gtp = 3, .edp = 3},
             "parallel.gtp = 3: this version of Moiety gathers dense weights"},
        Case{{.dp = 2, .egtp = 2},
             "parallel.egtp = 2: this version of Moiety gathers experts' weights"}}) {
    check_gpu_layout(c.grid, {});
    EXPECT_EQ(error_of([&] { check_gpu_layout(c.grid, gpu); }, ErrorKind::kUsage),
              std::string(c.text) + rest);
  }
}

TEST(ConfigCheck, MicroBatchesTakeTurnsOnCpuRanks) {
  TrainConfig c;
  c.run.dir = "r";
  c.run.ranks = 2;
  c.model.overlap = moe::Overlap::kMicroBatch;
  const auto check = [&] { check_training(c, check_layout(c)); };
  c.train.global_batch = 2;
  check();  // without expert parallelism nothing travels
  c.parallel.ep = 2;
  EXPECT_EQ(error_of(check, ErrorKind::kUsage),
            "ep.overlap = \"micro_batch\": two micro-batches take turns, and a step has one: "
            "train.global_batch = 2 is train.micro_batch x data ranks = 1 x 2");
  c.train.global_batch = 4;
  check();
  c.ep.depth = 1;
  EXPECT_EQ(
      error_of(check, ErrorKind::kUsage),
      "ep.overlap = \"micro_batch\": ep.depth is 1, and the exchanges of two micro-batches are "
      "under way; 2 to 8");
  check_overlap(c, {});
  const Device gpu{DeviceType::kCuda, 0};
  EXPECT_EQ(
      error_of([&] { check_overlap(c, gpu); }, ErrorKind::kUsage),
      "ep.overlap = \"micro_batch\": micro-batches take turns on CPU ranks alone, and the run "
      "is on cuda:0; none, wgrad or shared");
  c.model.overlap = moe::Overlap::kShared;
  check_overlap(c, gpu);
}

}  // namespace
}  // namespace moiety::train
