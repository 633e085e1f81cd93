#include "moiety/train/memory_use.h"

#include "moiety/base/gpu.h"
#include "moiety/train/cpu_peak.h"

namespace moiety::train {

MemoryUse memory_use(Device device) {
  if (device.type == DeviceType::kCpu) return {resident_bytes(), machine_bytes()};
  const auto total = double(gpu_properties(device.index).memory);
  return {total - double(gpu_free_memory(device.index)), total};
}

}  // namespace moiety::train
