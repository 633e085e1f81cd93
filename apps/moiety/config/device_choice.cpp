#include "apps/moiety/config/device_choice.h"

#include <algorithm>

#include "apps/moiety/exit_code.h"
#include "moiety/base/integer.h"
#include "moiety/base/log.h"
#include "moiety/comm/gpu_transport.h"
#include "moiety/comm/gpu_waits.h"

namespace moiety::app {
namespace {

constexpr int kLeastMajor = 9;  // Hopper
// A rank's streams that wait for peers: its own, the lane of what travels beside computing, and that
// of the exchange of experts.
constexpr int kStreams = 3;
constexpr int kMostOfGpu = comm::kMaxWaitingStreamsOfGpu / kStreams;

std::string gpus_text(int count) { return text("{} GPU{}", count, count == 1 ? "" : "s"); }

int here(const DeviceWish& wish) { return wish.here > 0 ? wish.here : wish.ranks; }

std::string ranks_text(const DeviceWish& wish) {
  const std::string part = here(wish) == wish.ranks ? "" : text(", {} of them here", here(wish));
  return text("run.ranks = {}{}", wish.ranks, part);
}

// Why the ranks cannot compute on GPUs, wherever that is; empty if they can.
std::string refusal_of(const DeviceWish& wish) {
  if (wish.ranks == 1) return {};
  if (!wish.refusal.empty()) return wish.refusal;
  if (here(wish) == wish.ranks) return {};
  if (wish.no_nccl.empty()) return {};
  return text("{} ranks are on several hosts, between which NCCL carries what they send: {}",
              wish.ranks, wish.no_nccl);
}

}  // namespace

DeviceChoice choose_device(const DeviceWish& wish, const GpuStatus& gpus, int major) {
  const Device gpu{DeviceType::kCuda, 0};
  if (wish.device == "cpu") return {};
  const bool demanded = wish.device == "cuda";
  if (gpus.count == 0) {
    if (demanded) throw DeviceError("run.device = \"cuda\": {}", gpus.text);
    return {};
  }
  if (major < kLeastMajor) {
    const std::string old = text("{} is of compute capability {}.x, but at least {}.0 is needed",
                                 name(gpu), major, kLeastMajor);
    if (demanded) throw DeviceError("run.device = \"cuda\": {}", old);
    return {.device = {}, .note = old + ": computing on the CPU"};
  }
  if (const std::string refusal = refusal_of(wish); !refusal.empty()) {
    if (demanded) throw UsageError("run.device = \"cuda\": {}", refusal);
    return {.device = {}, .note = refusal + ": computing on the CPU"};
  }
  if (wish.apart && gpus.count == 1 && !wish.share) return {.device = gpu};
  if (here(wish) > gpus.count && !wish.share) {
    if (demanded) {
      throw DeviceError(
          "{} and run.device = \"cuda\": this host has {}; take at most {} here, let "
          "ranks share GPUs (--run.share_gpus), or take CPUs (--run.device=cpu)",
          ranks_text(wish), gpus_text(gpus.count),
          gpus.count == 1 ? "1 rank" : text("{} ranks", gpus.count));
    }
    return {
        .device = {},
        .note = text("{}, and this host has {} (run.share_gpus lets ranks share them): computing "
                     "on the CPU",
                     ranks_text(wish), gpus_text(gpus.count))};
  }
  const int taken = std::min(here(wish), gpus.count);
  const int of_gpu = static_cast<int>(ceil_div(here(wish), taken));
  if (of_gpu > kMostOfGpu) {
    const std::string many = text("{}, and this host has {}: at most {} ranks can share one",
                                  ranks_text(wish), gpus_text(gpus.count), kMostOfGpu);
    if (demanded) throw UsageError("run.device = \"cuda\": {}", many);
    return {.device = {}, .note = many + ": computing on the CPU"};
  }
  return {.device = gpu, .gpus = taken, .of_gpu = of_gpu};
}

DeviceChoice common_choice(DeviceChoice mine, std::span<const std::string> reasons) {
  if (mine.device.type == DeviceType::kCpu) return mine;
  for (size_t r = 0; r < reasons.size(); ++r) {
    if (!reasons[r].empty()) return {.device = {}, .note = text("rank {}: {}", r, reasons[r])};
  }
  return mine;
}

namespace {

// What this rank chooses when it knows of the others, whatever each was told. Collective.
DeviceChoice agree(const DeviceWish& wish, const DeviceChoice& mine, const std::string& no_gpu,
                   comm::Bootstrap& bootstrap) {
  std::string reason;
  if (mine.device.type == DeviceType::kCpu) {
    const std::string why = wish.device == "cpu" ? "run.device = \"cpu\"" : no_gpu;
    reason = mine.note.empty() ? why + ": computing on the CPU" : mine.note;
  }
  const std::vector<std::string> reasons = bootstrap.all_gather(reason);
  std::string shared;
  if (std::ranges::all_of(reasons, &std::string::empty)) {
    try {  // each may see one GPU, and all the same one
      const int gpu = comm::rank_on_host(bootstrap) % mine.gpus;
      comm::check_own_gpus(bootstrap, {DeviceType::kCuda, gpu});
    } catch (const Error& e) {
      shared = e.what();
    }
  }
  if (wish.device != "auto") return mine;
  if (!shared.empty() && !wish.share) {
    return {.device = {}, .note = text("{}: computing on the CPU", shared)};
  }
  return common_choice(mine, reasons);
}

}  // namespace

DeviceChoice rank_devices(const DeviceWish& wish, comm::Bootstrap* bootstrap) {
  const GpuStatus& gpus = gpu_status();
  DeviceChoice choice = choose_device(wish, gpus, gpus.count > 0 ? gpu_properties(0).major : 0);
  if (bootstrap) choice = agree(wish, choice, gpus.text, *bootstrap);
  if (!choice.note.empty()) log(LogLevel::kInfo, "{}", choice.note);
  return choice;
}

Device rank_device(std::string_view wanted) { return rank_devices({.device = wanted}).device; }

}  // namespace moiety::app
