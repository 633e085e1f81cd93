#include <algorithm>

#include "moiety/moe/peers/step_exchange.h"

namespace moiety::moe::peers {

namespace {

EpLimits one_at_a_time(const EpLimits& limits) {
  EpLimits out = limits;
  out.depth = 1;
  return out;
}

EpBytes carried_bytes(const ExpertMap& map, const EpLimits& limits, const EpOptions& options) {
  EpBytes bytes = carried_layout(map, limits, options).bytes;
  const CarryPlaces places = carry_places(map, limits, options);
  bytes.words += places.boxes - places.nowhere;
  bytes.regions += places.greetings - places.boxes;
  bytes.meta += places.end - places.greetings;
  bytes.total = places.end;
  bytes.loss = bytes.total - bytes.words - bytes.meta - bytes.regions;
  return bytes;
}

}  // namespace

MappedLayout carried_layout(const ExpertMap& map, const EpLimits& limits,
                            const EpOptions& options) {
  MappedLayout out = mapped_layout(map, one_at_a_time(limits), options);
  const int64_t pairs = (map.ranks() - 1) * rows_max(limits) * limits.topk * out.bytes.pair;
  const int64_t more = std::max<int64_t>(0, pairs - out.half);
  out.half += more;
  out.bytes.regions += more;
  out.bytes.total += more;
  return out;
}

CarryPlaces carry_places(const ExpertMap& map, const EpLimits& limits, const EpOptions& options) {
  const MappedLayout layout = carried_layout(map, limits, options);
  CarryPlaces out;
  out.nowhere = layout.bytes.total;
  out.boxes = round_up(out.nowhere + layout.bytes.words, 256);
  const int64_t box = std::max(layout.half, (map.ranks() - 1) * layout.message);
  out.greetings = round_up(out.boxes + box, 256);
  out.end = round_up(out.greetings + int64_t{sizeof(Greeting)} * map.ranks(), 256);
  return out;
}

EpBytes peer_bytes(const ExpertMap& map, const EpLimits& limits, const EpOptions& options) {
  if (options.transport == EpTransport::kCollectives) return carried_bytes(map, limits, options);
  EpBytes bytes = mapped_layout(map, limits, options).bytes;
  const int64_t used = bytes.words + bytes.meta + bytes.regions;
  const int64_t probes = 8 * map.ranks();  // of the symmetric buffer, behind its last byte
  bytes.total = round_up(used + probes, comm::kGpuMemoryUnit) - probes;
  bytes.loss = bytes.total - used;
  return bytes;
}

void PeerExchange::check() {
  const std::string why = failure();
  if (!why.empty()) throw_error(ErrorKind::kComm, why);
}

std::string fault_text(const std::string& group, double deadline, const Fault& fault, int rank,
                       const std::string& abort) {
  if (fault.kind == kStopped) return stopped_text(group, fault.poison, fault.reason);
  if (fault.kind == kReleased) {
    return text("ep {}, group \"{}\": released, reserve it first", op_name(fault.mine.word), group);
  }
  switch (static_cast<Failure>(fault.kind)) {
    case Failure::kLate:
      return late_text(group, deadline, fault.late);
    case Failure::kMismatch:
      return mismatch_text(group, rank, fault.mine, fault.about, fault.theirs);
    case Failure::kPrepare:
      return difference_text(group, epoch_of(fault.mine.word), fault.field, fault.heads[0],
                             fault.other, fault.heads[1]);
    case Failure::kProtocol:
      return text("ep {}, group \"{}\", epoch {}: rank {} sees a flag of rank {} of epoch {}",
                  op_name(fault.mine.word), group, epoch_of(fault.mine.word), rank, fault.about,
                  epoch_of(fault.theirs.word));
    case Failure::kAborted:
      break;
  }
  return text("ep {}, group \"{}\", epoch {}: rank {} stopped: {}", op_name(fault.mine.word), group,
              epoch_of(fault.mine.word), rank, abort.empty() ? "a peer stopped" : abort);
}

}  // namespace moiety::moe::peers
