#include "moiety/moe/peers/prepare_message.h"

#include <algorithm>

#include "moiety/base/error.h"

namespace moiety::moe {

std::string difference_text(const std::string& group, Epoch epoch, int field,
                            const MessageHead& first, int rank, const MessageHead& other) {
  static constexpr const char* kNames[kHeadFields] = {"message version", "K", "E", "alignment",
                                                      "overflow policy"};
  static constexpr const char* kPolicies[] = {"kError", "kDrop", "kReport", "?"};
  const auto value = [&](const MessageHead& head) {
    const int32_t v = head_field(head, field);
    return field + 1 == kHeadFields ? kPolicies[std::clamp(v, 0, 3)] : text("{}", v);
  };
  return text("ep prepare, group \"{}\", epoch {}: {} differs: rank 0 has {}, rank {} has {}",
              group, epoch, kNames[field], value(first), rank, value(other));
}

}  // namespace moiety::moe
