#include "moiety/gtp/executor_parts.h"

#include <algorithm>
#include <cstring>

namespace moiety::gtp {

bool same(const Stream& a, const Stream& b) {
  if (!(a.device() == b.device())) return false;
  if (a.device().type == DeviceType::kCuda) return a.cuda_stream() == b.cuda_stream();
  // A CPU stream shows no identity of its own, but copies of one have equal bytes.
  return std::memcmp(static_cast<const void*>(&a), static_cast<const void*>(&b), sizeof a) == 0;
}

void Marks::record(const Stream& stream) {
  const auto end = points_.begin() + static_cast<std::ptrdiff_t>(used_);
  auto at =
      std::find_if(points_.begin(), end, [&](const auto& p) { return same(p.first, stream); });
  if (at == end) {
    if (used_ == points_.size()) points_.emplace_back();
    at = points_.begin() + static_cast<std::ptrdiff_t>(used_++);
    at->first = stream;
  }
  at->second.record(stream);
}

void Marks::wait(const Stream& stream) const {
  for (size_t i = 0; i < used_; ++i) {
    if (!same(points_[i].first, stream)) stream.wait(points_[i].second);
  }
}

Landed& LandingTable::at(BundleId bundle, const BundleLayout& layout, Views views, TensorView slot,
                         TensorView scratch) {
  return places_
      .try_emplace(Key{bundle, views, slot.raw(), scratch.raw()}, layout, views, slot, scratch)
      .first->second;
}

}  // namespace moiety::gtp
