// One object for each GPU, made at its first use and kept until the process ends.
#pragma once

#include <map>
#include <mutex>

namespace moiety {

template <class T>
T& per_device(int device) {
  static std::mutex mutex;
  // Never destroyed, since the CUDA run time may end before it.
  static auto& kept = *new std::map<int, T>;
  const std::lock_guard lock(mutex);
  return kept.try_emplace(device).first->second;
}

}  // namespace moiety
