#include "moiety/base/gpu.h"

#include <deque>
#include <mutex>
#include <optional>

#include "moiety/base/error.h"
#include "moiety/base/gpu_runtime.h"

namespace moiety {

std::string name(Device device) {
  return device.type == DeviceType::kCpu ? "cpu" : text("cuda:{}", device.index);
}

const GpuStatus& gpu_status() {
  static const GpuStatus status = gpu::find_gpus();
  return status;
}

void require_device(const char* what, Device device) {
  if (device.type == DeviceType::kCpu) return;
  const GpuStatus& status = gpu_status();
  if (device.index >= 0 && device.index < status.count) return;
  fail(ErrorKind::kUnsupported, "{}: {} was asked for, but {}", what, name(device),
       status.count == 0 ? status.text : text("the machine has {} GPUs", status.count));
}

void fail_without_cuda(const char* operation) {
  fail(ErrorKind::kUnsupported, "{}: {}", operation, gpu_status().text);
}

const GpuProperties& gpu_properties(int index) {
  require_device("gpu_properties", {DeviceType::kCuda, index});
  static std::mutex mutex;
  static std::deque<std::optional<GpuProperties>> known(gpu_status().count);
  const std::lock_guard lock(mutex);
  std::optional<GpuProperties>& one = known[index];
  if (!one) one = gpu::find_properties(index);
  return *one;
}

int64_t gpu_free_memory(int index) {
  require_device("gpu_free_memory", {DeviceType::kCuda, index});
  return gpu::free_memory(index);
}

}  // namespace moiety
