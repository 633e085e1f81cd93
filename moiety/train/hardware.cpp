#include "moiety/train/hardware.h"

#include <algorithm>
#include <cctype>
#include <string>

namespace moiety::train {

const Hardware* find_hardware(std::string_view gpu_name) {
  std::string lower(gpu_name);
  std::ranges::transform(lower, lower.begin(), [](unsigned char c) { return std::tolower(c); });
  const Hardware* found = nullptr;  // the longest name wins: gb200, not b200
  for (const Hardware& h : kHardware) {
    if (lower.find(h.name) == std::string::npos) continue;
    if (!found || std::string_view(h.name).size() > std::string_view(found->name).size())
      found = &h;
  }
  return found;
}

}  // namespace moiety::train
