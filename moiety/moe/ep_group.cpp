#include "moiety/moe/ep_group.h"

#include <algorithm>
#include <cstdint>

#include "moiety/base/copy.h"
#include "moiety/base/crc32c.h"
#include "moiety/base/cuda_built.h"
#include "moiety/base/error.h"
#include "moiety/comm/symmetric_buffer.h"
#include "moiety/moe/exchange_collective.h"
#include "moiety/moe/exchange_cuda.h"
#include "moiety/moe/exchange_mapped.h"
#include "moiety/moe/peers/peer_exchange.h"

namespace moiety::moe {
namespace {

// The limit of rows to a peer; 0 stands for any number.
int64_t peer_rows(const EpLimits& l) { return l.peer_rows == 0 ? INT64_MAX : l.peer_rows; }

bool fits(const EpLimits& wanted, const EpLimits& have) {
  return wanted.tokens <= have.tokens && wanted.model <= have.model && wanted.topk <= have.topk &&
         !wider(wanted.widest, have.widest) && wanted.depth <= have.depth &&
         wanted.rank_fp32 <= have.rank_fp32 && wanted.token_order <= have.token_order &&
         wanted.staged <= have.staged && peer_rows(wanted) <= peer_rows(have);
}

EpLimits larger(const EpLimits& a, const EpLimits& b) {
  return {.tokens = std::max(a.tokens, b.tokens),
          .model = std::max(a.model, b.model),
          .topk = std::max(a.topk, b.topk),
          .widest = wider(b.widest, a.widest) ? b.widest : a.widest,
          .depth = std::max(a.depth, b.depth),
          .rank_fp32 = a.rank_fp32 || b.rank_fp32,
          .token_order = a.token_order || b.token_order,
          .peer_rows = peer_rows(a) >= peer_rows(b) ? a.peer_rows : b.peer_rows,
          .staged = a.staged || b.staged};
}

const char* transport_name(EpTransport transport) {
  static constexpr const char* kNames[] = {"kAuto", "kMapped", "kCollectives"};
  return kNames[static_cast<int>(transport)];
}

std::string describe(const ExpertMap& map, const EpLimits& l, const EpOptions& o) {
  uint32_t owners = 0;
  for (int e = 0; e < map.experts(); ++e) {
    const int32_t owner = map.owner(e);
    owners = crc32c(&owner, sizeof(owner), owners);
  }
  return text(
      "group \"{}\" of {} experts (owners {:08x}), {} tokens, model {}, topk {}, rows of {}, "
      "depth {}, rank_fp32 {}, token_order {}, peer_rows {}, staged {}, chunks of {}, transport "
      "{}, "
      "zero_copy {}",
      o.name, map.experts(), owners, l.tokens, l.model, l.topk, name(l.widest), l.depth,
      l.rank_fp32, l.token_order, l.peer_rows, l.staged, o.chunk_rows, transport_name(o.transport),
      o.zero_copy == ZeroCopy::kOff ? "off" : "auto");
}

// Makes the exchange of the transport. Collective, unless the transport is given.
std::unique_ptr<Exchange> make_exchange(comm::Communicator& comm, const ExpertMap& map,
                                        const EpOptions& options) {
  const bool collectives = options.transport == EpTransport::kAuto
                               ? !comm::mappable(comm)
                               : options.transport == EpTransport::kCollectives;
  if (collectives) return std::make_unique<CollectiveExchange>(comm, map, options);
  return std::make_unique<MappedExchange>(comm, map, options);
}

EpBytes gpu_bytes(const ExpertMap& map, const EpLimits& limits, const EpOptions& options) {
  return map.ranks() == 1 ? record_sizes(map, limits, options, 1)
                          : peers::peer_bytes(map, limits, options);
}

TensorView findings_view(Findings* findings, Device device) {
  return {findings, DType::kUInt8, {int64_t{sizeof(Findings)}}, device};
}

}  // namespace

EpBytes EpGroup::bytes(const ExpertMap& map, const EpLimits& limits, const EpOptions& options) {
  if (options.device.type == DeviceType::kCuda) return gpu_bytes(map, limits, options);
  return options.transport == EpTransport::kCollectives
             ? collective_layout(map, limits, options).bytes
             : mapped_layout(map, limits, options).bytes;
}

EpGroup::EpGroup(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

EpGroup EpGroup::create(comm::Communicator& comm, ExpertMap map, const EpLimits& limits,
                        const EpOptions& options) {
  MOIETY_CHECK(map.ranks() == comm.size(),
               "ep, group \"{}\": the map has {} ranks, the communicator {}", options.name,
               map.ranks(), comm.size());
  EpGroup out(std::make_shared<Impl>(comm, std::move(map), options));
  EpOptions& chosen = out.impl_->options;
  if (out.impl_->on_gpu() && comm.size() > 1 && chosen.transport == EpTransport::kAuto &&
      !comm::mappable(comm, chosen.device)) {
    chosen.transport = EpTransport::kCollectives;
  }
  out.reserve(limits);
  return out;
}

void EpGroup::Impl::compare(const EpLimits& wanted) const {
  const std::vector<std::string> all = comm->bootstrap().all_gather(describe(map, wanted, options));
  for (size_t r = 1; r < all.size(); ++r) {
    if (all[r] != all[0]) {
      fail(ErrorKind::kComm, "ep: rank 0 asks for {}; rank {} asks for {}", all[0], r, all[r]);
    }
  }
}

void EpGroup::reserve(const EpLimits& limits) {
  Impl& g = *impl_;
  MOIETY_CHECK(g.state != Impl::State::kClosed, "ep, group \"{}\": closed", name());
  g.check_poison();
  g.wait();
  g.compare(limits);
  const bool open = g.state == Impl::State::kOpen;
  if (open && fits(limits, g.limits)) return;
  const EpLimits wanted = open ? larger(limits, g.limits) : limits;
  if (g.on_gpu()) {
    g.allocate_on_gpu(wanted);
  } else {
    if (!g.exchange) g.exchange = make_exchange(*g.comm, g.map, g.options);
    g.exchange->allocate(wanted);
  }
  g.limits = wanted;
  g.state = Impl::State::kOpen;
}

void EpGroup::Impl::allocate_on_gpu(const EpLimits& wanted) {
  gpu_bytes = moe::gpu_bytes(map, wanted, options);
  if (map.ranks() == 1) {
    if (!gpu_state.data()) gpu_state = Buffer(sizeof(GpuState), options.device, "ep group");
    return;
  }
  require_device("ep group", options.device);
  if constexpr (kCudaBuilt) {
    if (!peers) {
      peers = peers::make_peer_exchange(*comm, map, options);
      watch.emplace(*comm, *peers);
    }
    peers->allocate(wanted);
  }
}

void EpGroup::release() {
  Impl& g = *impl_;
  MOIETY_CHECK(g.state != Impl::State::kClosed, "ep, group \"{}\": closed", name());
  g.check_poison();
  g.wait();
  if (g.state == Impl::State::kReleased) return;
  g.free_memory();
  g.state = Impl::State::kReleased;
  g.limits = {};
}

// Waits for own operations and then for all ranks, which agree that they mean the same buffer.
void EpGroup::Impl::meet_outside(const char* operation, const std::string& what) const {
  MOIETY_CHECK(options.zero_copy == ZeroCopy::kAuto, "{}, group \"{}\": zero_copy is kOff",
               operation, options.name);
  check_usable(operation);
  MOIETY_CHECK(!peers || !peers->captured(last_stream),
               "{}, group \"{}\": while a graph is captured", operation, options.name);
  wait();
  if (!exchange && !peers) return;
  const std::vector<std::string> all = comm->bootstrap().all_gather(what);
  for (size_t r = 1; r < all.size(); ++r) {
    if (all[r] == all[0]) continue;
    fail(ErrorKind::kComm, "{}, group \"{}\": rank 0 gives {}; rank {} gives {}", operation,
         options.name, all[0], r, all[r]);
  }
}

void EpGroup::attach(const comm::SymmetricBuffer& buffer) {
  Impl& g = *impl_;
  g.meet_outside("ep attach", text("a buffer of {} bytes", buffer.bytes()));
  if (buffer.bytes() == 0) return;
  if (g.peers) {
    g.peers->attach(buffer);
  } else if (g.exchange) {
    g.exchange->attach(buffer);
  }
}

void EpGroup::detach(const comm::SymmetricBuffer& buffer) {
  Impl& g = *impl_;
  if (g.peers) {
    g.meet_outside("ep detach", text("a buffer of {} bytes", buffer.bytes()));
    MOIETY_CHECK(g.peers->detach(buffer), "ep detach, group \"{}\": the buffer is not attached",
                 name());
    return;
  }
  if (!g.exchange) return;
  const int place = g.exchange->place_of(buffer);
  MOIETY_CHECK(place >= 0, "ep detach, group \"{}\": the buffer is not attached", name());
  g.meet_outside("ep detach", text("buffer {}", place));
  g.exchange->detach(place);
}

void EpGroup::close() {
  Impl& g = *impl_;
  if (g.state == Impl::State::kClosed) return;
  g.wait();
  g.state = Impl::State::kClosed;
  g.free_memory();
  if (g.exchange) g.exchange->detach_all();
  g.gpu_state = {};
  g.watch.reset();
  g.peers = {};
}

void EpGroup::check() const { impl_->check_poison(); }

void EpGroup::check(Epoch epoch) {
  Impl& g = *impl_;
  g.wait();
  g.check_poison();
  const std::optional<Finding> first = g.take_finding(epoch);
  if (first) throw_error(ErrorKind::kInvalidArgument, first->text(name(), g.map.experts()));
}

std::optional<Finding> EpGroup::Impl::take_finding(Epoch epoch) {
  if (peers) return peers->take_finding(epoch);
  if (!on_gpu() || state == State::kClosed) return findings.take(epoch);
  const TensorView here = findings_view(&findings, {});
  const TensorView there = findings_view(&gpu()->findings, options.device);
  copy(here, there, last_stream);
  last_stream.synchronize();
  const std::optional<Finding> first = findings.take(epoch);
  if (first) copy(there, here, last_stream);
  return first;
}

void EpGroup::Impl::free_memory() {
  gpu_bytes = {};
  if (peers) peers->release();
  if (exchange) exchange->release();
}

void EpGroup::take_report(TensorView report, Stream stream) {
  constexpr const char* kName = "ep take_report";
  check_tensor(kName, "report", report, DType::kInt64, {3});
  impl_->check_stream(kName, stream);
  check_device(kName, "report", report, stream);
  if (impl_->peers) return impl_->peers->take_report(report, stream);
  if (impl_->on_gpu()) {
    if constexpr (kCudaBuilt) return take_report_cuda(report, impl_->gpu(), stream);
    fail_without_cuda(kName);
  }
  stream.run([impl = impl_, report] {
    for (int i = 0; i < 3; ++i) {
      report.data<int64_t>()[i * report.stride(0)] = std::exchange(impl->findings.report[i], 0);
    }
  });
}

const std::string& EpGroup::name() const { return impl_->options.name; }
int EpGroup::rank() const { return impl_->comm->rank(); }
int EpGroup::ranks() const { return impl_->map.ranks(); }
const ExpertMap& EpGroup::map() const { return impl_->map; }
Device EpGroup::device() const { return impl_->options.device; }
ZeroCopy EpGroup::zero_copy() const {
  return transport() == EpTransport::kMapped ? impl_->options.zero_copy : ZeroCopy::kOff;
}
EpTransport EpGroup::transport() const {
  const bool carried = impl_->options.transport == EpTransport::kCollectives && ranks() > 1;
  if (impl_->on_gpu()) return carried ? EpTransport::kCollectives : EpTransport::kMapped;
  return impl_->exchange->transport();
}
const EpLimits& EpGroup::limits() const { return impl_->limits; }
EpBytes EpGroup::bytes() const { return impl_->bytes(); }
Epoch EpGroup::epoch() const { return impl_->issued; }

}  // namespace moiety::moe
