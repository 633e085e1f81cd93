#include "moiety/moe/peers/step_exchange.h"

namespace moiety::moe::peers {

EpBytes peer_bytes(const ExpertMap& map, const EpLimits& limits, const EpOptions& options) {
  if (!limits.staged) {
    fail(ErrorKind::kUnsupported,
         "ep, group \"{}\": on GPUs rows are on their way in the group's memory (EpLimits staged)",
         options.name);
  }
  if (options.transport == EpTransport::kCollectives) {
    fail(ErrorKind::kUnsupported,
         "ep, group \"{}\": {} ranks on GPUs over collectives; they map each other's memory",
         options.name, map.ranks());
  }
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
