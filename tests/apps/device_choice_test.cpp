#include "apps/moiety/config/device_choice.h"

#include <gtest/gtest.h>

#include "apps/moiety/exit_code.h"

namespace moiety::app {
namespace {

constexpr Device kCpu{}, kGpu{DeviceType::kCuda, 0};
const GpuStatus kNone{.built = false, .text = "this build has no CUDA"};
const GpuStatus kTwo{.built = true, .runtime = 13000, .driver = 13000, .count = 2, .text = {}};

const DeviceWish kAuto{.device = "auto"}, kCuda{.device = "cuda"};

DeviceWish with_ranks(DeviceWish wish, int ranks, bool share = false) {
  wish.ranks = ranks;
  wish.share = share;
  return wish;
}

TEST(DeviceChoice, AutoTakesAGpuForEachRank) {
  EXPECT_EQ(choose_device(kAuto, kTwo, 9).device, kGpu);
  EXPECT_EQ(choose_device(kAuto, kTwo, 9).note, "");
  EXPECT_EQ(choose_device(kAuto, kTwo, 9).gpus, 1);
  EXPECT_EQ(choose_device(kCuda, kTwo, 10).device, kGpu);
  EXPECT_EQ(choose_device(kAuto, kNone, 0).device, kCpu);
  EXPECT_EQ(choose_device(with_ranks(kAuto, 4), kNone, 0).note, "");
  for (const DeviceWish& wish : {kAuto, kCuda}) {
    EXPECT_EQ(choose_device(with_ranks(wish, 2), kTwo, 9).device, kGpu);
    EXPECT_EQ(choose_device(with_ranks(wish, 2), kTwo, 9).gpus, 2);
    EXPECT_EQ(choose_device(with_ranks(wish, 3, true), kTwo, 9).device, kGpu);
    EXPECT_EQ(choose_device(with_ranks(wish, 3, true), kTwo, 9).gpus, 2);
  }
  for (const int ranks : {1, 4}) {
    const DeviceChoice choice = choose_device({.device = "cpu", .ranks = ranks}, kTwo, 9);
    EXPECT_EQ(choice.device, kCpu);
    EXPECT_EQ(choice.note, "");
  }
}

TEST(DeviceChoice, AutoSaysWhyAGpuIsLeftAlone) {
  const DeviceChoice several = choose_device(with_ranks(kAuto, 4), kTwo, 9);
  EXPECT_EQ(several.device, kCpu);
  EXPECT_EQ(several.note,
            "run.ranks = 4, and this host has 2 GPUs (run.share_gpus lets ranks share them): "
            "computing on the CPU");
  const DeviceChoice old = choose_device(kAuto, kTwo, 8);
  EXPECT_EQ(old.device, kCpu);
  EXPECT_EQ(
      old.note,
      "cuda:0 is of compute capability 8.x, but at least 9.0 is needed: computing on the CPU");
  DeviceWish refused = with_ranks(kAuto, 2);
  refused.refusal = "parallel.ep = 2: no";
  EXPECT_EQ(choose_device(refused, kTwo, 9).device, kCpu);
  EXPECT_EQ(choose_device(refused, kTwo, 9).note, "parallel.ep = 2: no: computing on the CPU");
  DeviceWish hosts = with_ranks(kAuto, 8);
  hosts.here = 2;
  EXPECT_EQ(choose_device(hosts, kTwo, 9).device, kGpu);
  EXPECT_EQ(choose_device(hosts, kTwo, 9).gpus, 2);
  hosts.no_nccl = "it is gone";
  EXPECT_EQ(choose_device(hosts, kTwo, 9).note,
            "8 ranks are on several hosts, between which NCCL carries what they send: it is gone: "
            "computing on the CPU");
}

TEST(DeviceChoice, AutoTakesGpusWhereAllRanksDo) {
  const DeviceChoice gpu{.device = kGpu, .gpus = 2}, cpu{.device = kCpu, .note = "mine"};
  const std::vector<std::string> all(3), some{"", "", "no GPU: computing on the CPU"};
  EXPECT_EQ(common_choice(gpu, all).device, kGpu);
  EXPECT_EQ(common_choice(gpu, all).gpus, 2);
  EXPECT_EQ(common_choice(gpu, some).device, kCpu);
  EXPECT_EQ(common_choice(gpu, some).note, "rank 2: no GPU: computing on the CPU");
  EXPECT_EQ(common_choice(cpu, some).note, "mine");
  DeviceWish apart = with_ranks(kAuto, 4);
  apart.apart = true;
  EXPECT_EQ(choose_device(apart, {.count = 1, .text = "one"}, 9).device, kGpu);
}

// The exit code and the text of a choice.
struct Outcome {
  ExitCode code;
  std::string text;
};
Outcome failure_of(const DeviceWish& wish, const GpuStatus& gpus, int major) {
  try {
    choose_device(wish, gpus, major);
  } catch (...) {
    const Failure failure = current_failure();
    return {failure.code(), failure.text};
  }
  return {kExitDone, ""};
}

TEST(DeviceChoice, CudaIsTakenOrRefused) {
  const Outcome none = failure_of(kCuda, kNone, 0);
  EXPECT_EQ(none.code, kExitDevice);
  EXPECT_EQ(none.text, "run.device = \"cuda\": this build has no CUDA");
  const Outcome old = failure_of(kCuda, kTwo, 8);
  EXPECT_EQ(old.code, kExitDevice);
  EXPECT_EQ(
      old.text,
      "run.device = \"cuda\": cuda:0 is of compute capability 8.x, but at least 9.0 is needed");
  const Outcome several = failure_of(with_ranks(kCuda, 4), kTwo, 9);
  EXPECT_EQ(several.code, kExitDevice);
  EXPECT_EQ(several.text,
            "run.ranks = 4 and run.device = \"cuda\": this host has 2 GPUs; take at most 2 ranks "
            "here, let ranks share GPUs (--run.share_gpus), or take CPUs (--run.device=cpu)");
  DeviceWish refused = with_ranks(kCuda, 2, true);
  refused.refusal = "parallel.gtp = 2: no";
  const Outcome layout = failure_of(refused, kTwo, 9);
  EXPECT_EQ(layout.code, kExitUsage);
  EXPECT_EQ(layout.text, "run.device = \"cuda\": parallel.gtp = 2: no");
  DeviceWish hosts = with_ranks(kCuda, 8);
  hosts.here = 2;
  EXPECT_EQ(choose_device(hosts, kTwo, 9).device, kGpu);
  EXPECT_EQ(choose_device(hosts, kTwo, 9).gpus, 2);
  hosts.here = 4;
  EXPECT_EQ(failure_of(hosts, kTwo, 9).text.substr(0, 50),
            "run.ranks = 8, 4 of them here and run.device = \"cu");
  hosts.no_nccl = "it is gone";
  EXPECT_EQ(failure_of(hosts, kTwo, 9).code, kExitUsage);
  DeviceWish apart = with_ranks(kCuda, 4);
  apart.apart = true;
  const DeviceChoice own = choose_device(apart, {.count = 1, .text = "one"}, 9);
  EXPECT_EQ(own.device, kGpu);
  EXPECT_EQ(own.gpus, 1);
  EXPECT_EQ(own.of_gpu, 1);
  EXPECT_EQ(failure_of(apart, kTwo, 9).code, kExitDevice);  // each sees the same two, or might
}

TEST(DeviceChoice, FewRanksShareAGpu) {
  EXPECT_EQ(choose_device(with_ranks(kCuda, 20, true), kTwo, 9).of_gpu, 10);
  const Outcome many = failure_of(with_ranks(kCuda, 21, true), kTwo, 9);
  EXPECT_EQ(many.code, kExitUsage);
  EXPECT_EQ(many.text,
            "run.device = \"cuda\": run.ranks = 21, and this host has 2 GPUs: at most 10 ranks can "
            "share one");
  const DeviceChoice instead = choose_device(with_ranks(kAuto, 21, true), kTwo, 9);
  EXPECT_EQ(instead.device, Device{});
  EXPECT_EQ(
      instead.note,
      "run.ranks = 21, and this host has 2 GPUs: at most 10 ranks can share one: computing on "
      "the CPU");
}

}  // namespace
}  // namespace moiety::app
