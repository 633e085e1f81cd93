#include "apps/moiety/config/device_choice.h"

#include <gtest/gtest.h>

#include "apps/moiety/exit_code.h"

namespace moiety::app {
namespace {

constexpr Device kCpu{}, kGpu{DeviceType::kCuda, 0};
const GpuStatus kNone{.built = false, .text = "this build has no CUDA"};
const GpuStatus kTwo{.built = true, .runtime = 13000, .driver = 13000, .count = 2, .text = {}};

TEST(DeviceChoice, AutoTakesAGpuForOneRank) {
  EXPECT_EQ(choose_device("auto", 1, kTwo, 9).device, kGpu);
  EXPECT_EQ(choose_device("auto", 1, kTwo, 9).note, "");
  EXPECT_EQ(choose_device("cuda", 1, kTwo, 10).device, kGpu);
  EXPECT_EQ(choose_device("auto", 1, kNone, 0).device, kCpu);
  EXPECT_EQ(choose_device("auto", 4, kNone, 0).note, "");
  for (const int ranks : {1, 4}) {
    const DeviceChoice choice = choose_device("cpu", ranks, kTwo, 9);
    EXPECT_EQ(choice.device, kCpu);
    EXPECT_EQ(choice.note, "");
  }
}

TEST(DeviceChoice, AutoSaysWhyAGpuIsLeftAlone) {
  const DeviceChoice several = choose_device("auto", 4, kTwo, 9);
  EXPECT_EQ(several.device, kCpu);
  EXPECT_EQ(
      several.note,
      "4 ranks on the CPU: this version of Moiety trains on one GPU, with one rank (run.ranks "
      "= 1)");
  const DeviceChoice old = choose_device("auto", 1, kTwo, 8);
  EXPECT_EQ(old.device, kCpu);
  EXPECT_EQ(
      old.note,
      "cuda:0 is of compute capability 8.x, but at least 9.0 is needed: computing on the CPU");
}

// The exit code and the text of a choice.
struct Outcome {
  ExitCode code;
  std::string text;
};
Outcome failure_of(int ranks, const GpuStatus& gpus, int major) {
  try {
    choose_device("cuda", ranks, gpus, major);
  } catch (...) {
    const Failure failure = current_failure();
    return {failure.code(), failure.text};
  }
  return {kExitDone, ""};
}

TEST(DeviceChoice, CudaIsTakenOrRefused) {
  const Outcome none = failure_of(1, kNone, 0);
  EXPECT_EQ(none.code, kExitDevice);
  EXPECT_EQ(none.text, "run.device = \"cuda\": this build has no CUDA");
  const Outcome old = failure_of(1, kTwo, 8);
  EXPECT_EQ(old.code, kExitDevice);
  EXPECT_EQ(
      old.text,
      "run.device = \"cuda\": cuda:0 is of compute capability 8.x, but at least 9.0 is needed");
  const Outcome several = failure_of(2, kTwo, 9);
  EXPECT_EQ(several.code, kExitUsage);
  EXPECT_EQ(
      several.text,
      "run.device = \"cuda\" and run.ranks = 2: this version of Moiety trains on one GPU, with "
      "one rank");
}

}  // namespace
}  // namespace moiety::app
