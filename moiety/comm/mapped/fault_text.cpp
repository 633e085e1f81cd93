#include "moiety/comm/mapped/fault_text.h"

#include <algorithm>

#include "moiety/base/error.h"

namespace moiety::comm::mapped {
namespace {

Collective collective(const PairCall& call) { return static_cast<Collective>(call.kind & 255); }

// "float32, 4096 B", of a row for all_to_all.
std::string operands(const PairCall& call) {
  const auto dtype = static_cast<DType>(call.kind >> 8 & 255);
  return text("{}, {} B", moiety::name(dtype), byte_size(dtype, call.elements));
}

std::string reduction(const PairCall& call) {
  switch (collective(call)) {
    case Collective::kAllReduce:
    case Collective::kReduceScatter:
      break;
    case Collective::kBroadcast:
      return text(", root {}", call.root);
    default:
      return "";
  }
  constexpr const char* kNames[] = {", sum", ", max", ", min"};
  return kNames[std::min<uint32_t>(call.kind >> 16 & 255, 2)];
}

// The call with what sets it apart from `other`.
std::string describe(const PairCall& call, const PairCall& other) {
  std::string out = text("{}({}{})", name(collective(call)), operands(call), reduction(call));
  if (call.place != other.place) {
    out += call.place ? text(" on place {:#x} of attached buffers", call.place)
                      : " outside attached buffers";
  }
  return out;
}

std::string rows_text(const Fault& fault) {
  const bool up = fault.mine.up != fault.theirs.up;
  const int low = std::min(fault.rank, fault.peer), high = std::max(fault.rank, fault.peer);
  const int from = up ? low : high, to = up ? high : low;
  const PairCall& sender = from == fault.rank ? fault.mine : fault.theirs;
  const PairCall& receiver = from == fault.rank ? fault.theirs : fault.mine;
  return text("all_to_all: rank {} sends {} rows to rank {}, which expects {}", from,
              up ? sender.up : sender.down, to, up ? receiver.up : receiver.down);
}

}  // namespace

PairCall pair_call(const CollectiveCall& call, int64_t place) {
  return {.kind = pack_kind(uint32_t(call.kind), uint32_t(call.dtype), uint32_t(call.op)),
          .root = call.root,
          .elements = call.elements,
          .place = place};
}

std::string fault_text(const std::string& name, const Fault& fault, const std::string& abort) {
  if (fault.kind == FaultKind::kMismatch) {
    const PairCall& a = fault.mine;
    const PairCall& b = fault.theirs;
    const bool only_rows =
        a.kind == b.kind && a.root == b.root && a.elements == b.elements && a.place == b.place;
    return text("comm \"{}\", operation {}: {}", name, fault.operation,
                only_rows ? rows_text(fault)
                          : text("rank {} runs {}, rank {} runs {}", fault.rank, describe(a, b),
                                 fault.peer, describe(b, a)));
  }
  const std::string what = text("comm \"{}\", {} {} ({})", name, comm::name(collective(fault.mine)),
                                fault.operation, operands(fault.mine));
  if (fault.kind == FaultKind::kAborted) {
    return text("{}: rank {} stopped waiting for rank {}: {}", what, fault.rank, fault.peer,
                abort.empty() ? "a peer stopped" : abort);
  }
  return text("{}: rank {} waited {:.1f} s for rank {} (its word is at {} of {})", what, fault.rank,
              double(fault.nanoseconds) * 1e-9, fault.peer, count_of(fault.word), fault.count);
}

}  // namespace moiety::comm::mapped
