#include "moiety/comm/mapped/attached.h"

#include "moiety/base/error.h"

namespace moiety::comm {

void AttachedBuffers::attach(const std::string& what, int ranks, const SymmetricBuffer& buffer) {
  MOIETY_CHECK(buffer && buffer.ranks() == ranks, "{}: attach: the buffer has {} ranks, not {}",
               what, buffer ? buffer.ranks() : 0, ranks);
  buffers_.push_back(buffer.impl_);
}

// Rank r's operand begins r * part bytes behind the place that all ranks have in common.
std::optional<mapped::Direct> AttachedBuffers::find(const std::byte* p, int64_t bytes,
                                                    int64_t part) const {
  for (size_t i = 0; i < buffers_.size(); ++i) {
    SymmetricBuffer buffer;
    buffer.impl_ = buffers_[i].lock();
    if (!buffer.contains(p, bytes)) continue;
    const int64_t offset = p - buffer.local();
    mapped::Direct out{.place = int64_t(i + 1) << 48 | offset << 1 | (part != 0), .at = {}};
    for (int r = 0; r < buffer.ranks(); ++r) out.at.push_back(buffer.peer(r) + offset + r * part);
    return out;
  }
  return std::nullopt;
}

std::optional<mapped::Direct> AttachedBuffers::find(const CollectiveCall& call, int me,
                                                    int ranks) const {
  const int64_t bytes = call.bytes();
  switch (call.kind) {
    case Collective::kAllGather:
      if (call.send == call.recv + me * bytes) return find(call.recv, ranks * bytes, bytes);
      return find(call.send, bytes, 0);
    case Collective::kReduceScatter:
      return find(call.send, ranks * bytes, 0);
    case Collective::kAllReduce:
    case Collective::kBroadcast:
      return find(call.send, bytes, 0);
    default:
      return std::nullopt;
  }
}

}  // namespace moiety::comm
