#include "moiety/train/memory_limit.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sys/resource.h>
#include <utility>

#include "moiety/base/error.h"
#include "moiety/base/gpu.h"
#include "moiety/train/cpu_peak.h"
#include "moiety/train/memory_estimate.h"

namespace moiety::train {
namespace {

// The part of a limited address space that the threads of a rank reserve before they hold a tensor:
// four stacks (8 MiB) with an allocator's heap each (64 MiB), and the heap that is being aligned.
constexpr int64_t kAddressesOfRank = (4 * (8 + 64) + 128) << 20;
// The reserve on a GPU: kernels that are loaded at their first launch, captured graphs, and holes
// between blocks.
constexpr int64_t kGpuReserve = int64_t{1} << 30;

int64_t control_group_limit() {
  for (const char* path :
       {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    std::ifstream file(path);
    int64_t bytes = 0;
    if (file >> bytes && bytes > 0) return bytes;
  }
  return std::numeric_limits<int64_t>::max();
}

}  // namespace

int64_t memory_of_rank(const RankShare& share, Device device) {
  if (device.type == DeviceType::kCuda) {
    return std::max<int64_t>(0, gpu_free_memory(device.index) - kGpuReserve) / share.of_gpu;
  }
  int64_t bytes =
      std::min(static_cast<int64_t>(machine_bytes()), control_group_limit()) / share.of_machine;
  rlimit limit{};
  for (const auto kind : {RLIMIT_AS, RLIMIT_DATA}) {
    if (::getrlimit(kind, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) continue;
    const int64_t free =
        static_cast<int64_t>(limit.rlim_cur) - static_cast<int64_t>(mapped_bytes());
    bytes = std::min(bytes, std::max<int64_t>(0, free / share.of_process - kAddressesOfRank));
  }
  return bytes;
}

std::optional<std::string> nearest_fit(const TrainConfig& config, const Grid& grid, int64_t limit,
                                       Device device) {
  const int64_t tokens = config.pass_tokens();
  const int64_t chunk = std::max<int64_t>(1, std::min<int64_t>(tokens, 256));
  using model::Recompute;
  const auto fits = [&](int64_t micro_batch, int64_t loss_chunk, bool async,
                        std::optional<Recompute> recompute = {}) {
    TrainConfig changed = config;
    changed.train.micro_batch = micro_batch;
    changed.checkpoint.async = async;
    changed.model.loss_chunk = loss_chunk;
    changed.model.recompute = recompute.value_or(config.model.recompute);
    return estimate_memory(changed, grid, device).total() <= limit;
  };
  // The snapshot of a GPU's state is not in the GPU's memory.
  const bool async = config.checkpoint.async, gpu = device.type == DeviceType::kCuda;
  if (fits(config.train.micro_batch, chunk, async)) return text("memory.loss_chunk = {}", chunk);
  if (config.model.overlap == moe::Overlap::kMicroBatch && grid.ep > 1) {
    TrainConfig changed = config;
    changed.model.overlap = moe::Overlap::kNone;
    if (estimate_memory(changed, grid, device).total() <= limit) return "ep.overlap = none";
  }
  if (config.model.row_layout == moe::RowLayout::kExpert && grid.ep == 1 && !gpu) {
    TrainConfig changed = config;
    changed.model.row_layout = moe::RowLayout::kRank;
    if (estimate_memory(changed, grid, device).total() <= limit) return "moe.layout = rank";
  }
  if (async && !gpu && fits(config.train.micro_batch, config.model.loss_chunk, false)) {
    return "checkpoint.async = false";
  }
  for (const auto& [name, mode] :
       {std::pair("moe", Recompute::kMoe), std::pair("full", Recompute::kFull)}) {
    if (mode > config.model.recompute &&
        fits(config.train.micro_batch, config.model.loss_chunk, async, mode)) {
      return text("memory.recompute = {}", name);
    }
  }
  for (int64_t micro_batch = config.train.micro_batch - 1; micro_batch >= 1; --micro_batch) {
    if (config.train.micro_batch % micro_batch != 0) continue;
    if (fits(micro_batch, config.model.loss_chunk, async)) {
      return text("train.micro_batch = {}", micro_batch);
    }
  }
  const int64_t short_chunk = std::min<int64_t>(chunk, config.data.seq_len);
  if (fits(1, short_chunk, false, Recompute::kFull)) {
    return text("train.micro_batch = 1, memory.recompute = full{} memory.loss_chunk = {}{}",
                gpu ? " and" : ",", short_chunk, gpu ? "" : " and checkpoint.async = false");
  }
  return std::nullopt;
}

std::string memory_report(const TrainConfig& config, const Grid& grid, int64_t limit,
                          Device device) {
  const MemoryEstimate m = estimate_memory(config, grid, device);
  const std::optional<std::string> change =
      nearest_fit(config, grid, std::min(limit, m.total() / 10 * 9), device);
  std::string classes;
  for (const auto& [name, bytes] : memory_classes(m)) {
    classes += text("{}{} {}", classes.empty() ? "" : ", ", name, bytes_text(bytes));
  }
  return text("a rank needs {}: {}; it may take {}; {}", bytes_text(m.total()), classes,
              bytes_text(limit),
              change ? "the nearest change that fits: " + *change
                     : text("no batch fits: a smaller model, or {}",
                            device.type == DeviceType::kCuda ? "a GPU with more memory"
                                                             : "more ranks on other machines"));
}

void check_memory(const TrainConfig& config, const Grid& grid, int64_t limit, Device device) {
  if (estimate_memory(config, grid, device).total() > limit) {
    fail(ErrorKind::kOutOfMemory, "out of memory before the first step");
  }
}

}  // namespace moiety::train
