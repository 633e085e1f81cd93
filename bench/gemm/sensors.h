// The clock and the power of a GPU while something runs on it, as NVML tells them.
#pragma once

#include "moiety/base/shared_library.h"

namespace moiety::bench {

class Sensors {
 public:
  struct Reading {
    double mhz = 0, watts = 0;  // of the multiprocessors' clock now, and of the last second
  };

  // Opens those of the first GPU that the process sees.
  Sensors() {
    const SharedLibrary driver = SharedLibrary::open({"libcuda.so.1"});
    const SharedLibrary nvml = SharedLibrary::open({"libnvidia-ml.so.1"});
    const auto bus_of = driver.find<int(char*, int, int)>("cuDeviceGetPCIBusId");
    const auto begin = nvml.find<int()>("nvmlInit_v2");
    const auto device_of = nvml.find<int(const char*, void**)>("nvmlDeviceGetHandleByPciBusId_v2");
    nvml.find("nvmlDeviceGetClockInfo", clock_of_);
    nvml.find("nvmlDeviceGetPowerUsage", power_of_);
    char bus[64] = {};
    if (!bus_of || !begin || !device_of || begin() != 0 || bus_of(bus, sizeof bus, 0) != 0 ||
        device_of(bus, &device_) != 0) {
      device_ = nullptr;
    }
  }
  // Zeros where there is no NVML.
  Reading read() const {
    constexpr int kMultiprocessors = 1;
    unsigned mhz = 0, milliwatts = 0;
    if (device_ && clock_of_) clock_of_(device_, kMultiprocessors, &mhz);
    if (device_ && power_of_) power_of_(device_, &milliwatts);
    return {double(mhz), double(milliwatts) * 1e-3};
  }

 private:
  void* device_ = nullptr;
  int (*clock_of_)(void*, int, unsigned*) = nullptr;
  int (*power_of_)(void*, unsigned*) = nullptr;
};

}  // namespace moiety::bench
