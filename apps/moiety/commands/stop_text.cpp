#include "apps/moiety/commands/stop_text.h"

#include <algorithm>
#include <utility>

namespace moiety::app {

std::string StopText::add(std::string_view bytes) {
  if (met_) return "";
  held_ += bytes;
  size_t shown = held_.size();
  for (const std::string& stop : stops_) {
    if (const size_t at = held_.find(stop); at != held_.npos) {
      met_ = true;
      shown = std::min(shown, at);
    }
  }
  if (met_) return std::exchange(held_, "").substr(0, shown);
  for (const std::string& stop : stops_) {
    for (size_t n = std::min(stop.size() - 1, held_.size()); n > 0; --n) {
      if (!held_.ends_with(std::string_view(stop).substr(0, n))) continue;
      shown = std::min(shown, held_.size() - n);
      break;
    }
  }
  const std::string out = held_.substr(0, shown);
  held_.erase(0, shown);
  return out;
}

std::string StopText::rest() { return std::exchange(held_, ""); }

}  // namespace moiety::app
