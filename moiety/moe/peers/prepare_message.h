// The messages that prepares send each other (docs/spec/ep.md#messages-of-prepare).
#pragma once

#include <cstdint>
#include <string>

#include "moiety/base/host_device.h"
#include "moiety/moe/ep_group.h"

namespace moiety::moe {

// The head of a message. Behind it come count[E], rows[R], then the rows' records: token, 0, and
// per choice {local expert or -1, index among the sender's pairs of that expert}. layout stands for
// other kinds of plans. Bytes 48 to 63 name the first bad index; bytes 64 to 71 name the rank that
// most rows are for, before any cut, and their number. So all ranks can report them.
struct MessageHead {
  char magic[8] = {'M', 'E', 'P', 1};
  int64_t capacity = 0;
  int32_t tokens = 0, topk = 0, experts = 0, alignment = 0;
  int32_t layout = 0, policy = 0, bad = 0, cut = 0;
  int32_t bad_token = -1, bad_choice = -1;
  int64_t bad_index = 0;
  int32_t most_rows = 0, most_rows_to = 0;
  char rest[56] = {};
};
static_assert(sizeof(MessageHead) == 128);

struct Choice {
  int32_t expert = -1, pair = 0;
};

// What must be equal in all heads, and its values, in the order in which differences are told.
inline constexpr int kHeadFields = 5;
MOIETY_HD_INLINE int32_t head_field(const MessageHead& head, int field) {
  const int32_t values[kHeadFields] = {head.magic[3], head.topk, head.experts, head.alignment,
                                       head.policy};
  return values[field];
}
// The first field that differs; -1 if none does.
MOIETY_HD_INLINE int differing_field(const MessageHead& a, const MessageHead& b) {
  for (int field = 0; field < kHeadFields; ++field) {
    if (head_field(a, field) != head_field(b, field)) return field;
  }
  return -1;
}
// "ep prepare, group "moe", epoch 3: K differs: rank 0 has 8, rank 5 has 6".
std::string difference_text(const std::string& group, Epoch epoch, int field,
                            const MessageHead& first, int rank, const MessageHead& other);

}  // namespace moiety::moe
