// The symmetric buffers that a communicator's operations may read where they lie.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "moiety/comm/mapped/plan.h"
#include "moiety/comm/symmetric_buffer.h"

namespace moiety::comm {

class AttachedBuffers {
 public:
  // `what` opens the error: Error(kInvalidArgument) unless the buffer has `ranks` ranks.
  void attach(const std::string& what, int ranks, const SymmetricBuffer& buffer);

  // The operand that peers of rank `me` read in this call, if it lies in an attached buffer.
  std::optional<mapped::Direct> find(const CollectiveCall& call, int me, int ranks) const;

 private:
  std::optional<mapped::Direct> find(const std::byte* p, int64_t bytes, int64_t part) const;

  std::vector<std::weak_ptr<SymmetricBuffer::Impl>> buffers_;
};

}  // namespace moiety::comm
