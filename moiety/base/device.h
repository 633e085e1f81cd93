// The place of memory and work: the CPU or one of the GPUs.
#pragma once

#include <cstdint>
#include <string>

namespace moiety {

enum class DeviceType : uint8_t { kCpu, kCuda };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

// "cpu", "cuda:0".
std::string name(Device device);

}  // namespace moiety
