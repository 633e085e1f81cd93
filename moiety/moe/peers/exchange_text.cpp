#include "moiety/moe/peers/exchange_text.h"

#include "moiety/base/error.h"

namespace moiety::moe {
namespace {

constexpr const char* kOpNames[] = {"nothing",          "prepare",           "dispatch", "combine",
                                    "combine_backward", "dispatch_backward", "?",        "?"};
constexpr const char* kReductionNames[] = {"kRank", "kRankFp32", "kToken", "?"};

Entry entry_from(const uint64_t* words) {
  return {words[0], static_cast<int64_t>(words[1]), static_cast<Epoch>(words[2])};
}

}  // namespace

const char* op_name(uint64_t word) { return kOpNames[word & 7]; }

std::string describe(const Entry& entry) {
  const uint64_t word = entry.word;
  const auto op = static_cast<OpKind>(word & 7);
  if (op == OpKind::kPrepare) return word >> 9 & 1 ? "prepare_dispatch" : "prepare";
  const bool sums = op == OpKind::kCombine || op == OpKind::kDispatchBackward;
  return text("{}({}, {} B{}{}{}{}) of plan {}", op_name(word),
              name(static_cast<PayloadFormat>(word >> 3 & 7)), entry.row_bytes,
              word >> 6 & 1 ? ", weights" : "", word >> 9 & 1 ? ", early" : "", sums ? ", " : "",
              sums ? kReductionNames[word >> 7 & 3] : "", entry.plan);
}

std::string mismatch_text(const std::string& group, int rank, const Entry& entry, int peer,
                          const Entry& peers) {
  return text("ep, group \"{}\", epoch {}: rank {} runs {}, rank {} runs {}", group,
              epoch_of(entry.word), rank, describe(entry), peer, describe(peers));
}

std::string late_text(const std::string& group, double seconds, const LateWait& late) {
  const Awaited& awaited = late.awaited;
  std::string what = text("chunk {} of {}", awaited.chunk + 1, awaited.of);
  if (late.shift == 0) {
    what = text("credit {}", late.wanted);
  } else if (awaited.of == 0) {
    what = awaited.chunk < 0 ? "its entry" : "its routing";
  }
  const std::string seen = late.newest == 0 ? text("rank {} not seen yet", awaited.from)
                                            : text("rank {} last seen in {}, {}", awaited.from,
                                                   op_name(late.newest), epoch_of(late.newest));
  return text(
      "ep {}, group \"{}\", epoch {}: rank {} waited {:.1f} s for rank {}, {} (word at {}); {}",
      op_name(late.entered), group, epoch_of(late.entered), late.rank, seconds, awaited.from, what,
      late.word >> late.shift, seen);
}

std::string stopped_text(const std::string& group, uint64_t poison, const uint64_t* reason) {
  static constexpr const char* kWhy[] = {"",
                                         "which waited for rank {}",
                                         "",
                                         "whose prepare differs from that of rank {}",
                                         "which saw a flag of rank {} out of order",
                                         "which saw rank {} abort"};
  const int origin = origin_of(poison), about = static_cast<int>(poison >> 13 & 1023);
  if (static_cast<Failure>(poison & 7) == Failure::kMismatch) {
    return mismatch_text(group, origin, entry_from(reason), about, entry_from(reason + 3));
  }
  return text("ep, group \"{}\", epoch {}: stopped by rank {}, ", group, poison >> 23, origin) +
         text(kWhy[poison & 7], about);
}

}  // namespace moiety::moe
