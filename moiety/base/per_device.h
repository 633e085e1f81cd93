// One object for each GPU, made at its first use and kept until the process ends.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <tuple>

namespace moiety {

template <class T>
T& per_device(int device) {
  static std::mutex mutex;
  // Never destroyed, since the CUDA run time may end before it.
  static auto& kept = *new std::map<int, T>;
  const std::lock_guard lock(mutex);
  return kept.try_emplace(device).first->second;
}

// A number for each kernel as it is launched, found when it is first asked for: the run time takes
// microseconds to say how many blocks of one fit.
class KernelNumbers {
 public:
  // `kernel`: its address.
  template <class Find>
  int64_t of(const void* kernel, int threads, int64_t shared_bytes, Find&& find) {
    const std::tuple key{kernel, threads, shared_bytes};
    const std::lock_guard lock(mutex_);
    auto it = numbers_.find(key);
    if (it == numbers_.end()) it = numbers_.emplace(key, find()).first;
    return it->second;
  }

 private:
  std::mutex mutex_;
  std::map<std::tuple<const void*, int, int64_t>, int64_t> numbers_;
};

}  // namespace moiety
