#include "moiety/moe/ep_group.h"

#include <algorithm>
#include <cstdint>

#include "moiety/base/crc32c.h"
#include "moiety/base/error.h"
#include "moiety/moe/exchange.h"

namespace moiety::moe {
namespace {

constexpr int64_t kPage = 4096;

int64_t element_bytes(PayloadFormat format) { return format == PayloadFormat::kFP32 ? 4 : 2; }

void check_limits(const ExpertMap& map, const EpLimits& l, const EpOptions& o) {
  const auto in = [&](const char* what, int64_t value, int64_t low, int64_t high) {
    MOIETY_CHECK(value >= low && value <= high, "ep, group \"{}\": {} {} is outside [{}, {}]",
                 o.name, what, value, low, high);
  };
  in("ranks", map.ranks(), 1, kMaxRanks);
  in("tokens", l.tokens, 0, INT32_MAX);
  in("model", l.model, 1, int64_t{1} << 40);
  in("topk", l.topk, 1, kMaxTopk);
  in("depth", l.depth, 1, 2);
  in("chunk_rows", o.chunk_rows, 1, INT32_MAX);
  in("ranks x tokens x topk", map.ranks() * l.tokens * l.topk, 0, INT32_MAX);
}

bool fits(const EpLimits& wanted, const EpLimits& have) {
  return wanted.tokens <= have.tokens && wanted.model <= have.model && wanted.topk <= have.topk &&
         element_bytes(wanted.widest) <= element_bytes(have.widest) && wanted.depth <= have.depth &&
         wanted.rank_fp32 <= have.rank_fp32 && wanted.token_order <= have.token_order;
}

EpLimits larger(const EpLimits& a, const EpLimits& b) {
  return {.tokens = std::max(a.tokens, b.tokens),
          .model = std::max(a.model, b.model),
          .topk = std::max(a.topk, b.topk),
          .widest = element_bytes(a.widest) >= element_bytes(b.widest) ? a.widest : b.widest,
          .depth = std::max(a.depth, b.depth),
          .rank_fp32 = a.rank_fp32 || b.rank_fp32,
          .token_order = a.token_order || b.token_order};
}

std::string describe(const ExpertMap& map, const EpLimits& l, const EpOptions& o) {
  uint32_t owners = 0;
  for (int e = 0; e < map.experts(); ++e) {
    const int32_t owner = map.owner(e);
    owners = crc32c(&owner, sizeof(owner), owners);
  }
  return text(
      "group \"{}\" of {} experts (owners {:08x}), {} tokens, model {}, topk {}, {} bytes an "
      "element, depth {}, rank_fp32 {}, token_order {}, chunks of {}",
      o.name, map.experts(), owners, l.tokens, l.model, l.topk, element_bytes(l.widest), l.depth,
      l.rank_fp32, l.token_order, o.chunk_rows);
}

}  // namespace

EpLayout ep_layout(const ExpertMap& map, const EpLimits& l, const EpOptions& o) {
  check_limits(map, l, o);
  const int64_t ranks = map.ranks(), experts = map.experts(), b = element_bytes(l.widest);
  EpLayout out;
  out.chunks = ceil_div(l.tokens, o.chunk_rows);
  EpBytes& bytes = out.bytes;
  bytes.record = record_bytes(l.model * b, l.topk);
  bytes.record_reduce = record_bytes(l.model * (l.rank_fp32 ? 4 : b), l.topk);
  bytes.pair = l.token_order ? pair_record_bytes(l.model * b) : 0;

  // Far below 2^63 as far as memories go; a product that is not is caught here.
  const double regions = 2.0 * ranks * l.tokens * l.topk * (4.0 * l.model + 256);
  MOIETY_CHECK(regions < 0x1p62, "ep, group \"{}\": {} tokens of {} elements are too many", o.name,
               l.tokens, l.model);
  out.half = (ranks - 1) * l.tokens * std::max(bytes.record, bytes.record_reduce);
  if (ranks > 1) out.half = std::max(out.half, l.tokens * l.topk * bytes.pair);
  out.message = 128 + round_up(4 * (experts + ranks), 128) + l.tokens * (8 + 8 * l.topk);
  bytes.regions = l.depth * out.half;
  bytes.meta = l.depth * (ranks - 1) * out.message;

  int64_t end = 0;
  const auto place = [&](int64_t& where, int64_t size) {
    where = end;
    end += round_up(size, 128);
  };
  place(out.addr, 8 * l.depth * ranks);
  place(out.width, 8 * l.depth * ranks);
  place(out.head, 8 * l.depth * ranks);
  place(out.ready, 8 * l.depth * ranks * (out.chunks + 1));
  place(out.credit, 8 * ranks);
  place(out.poison, 8);
  bytes.words = end;
  place(out.meta, bytes.meta);
  place(out.regions, bytes.regions);
  bytes.total = round_up(end, kPage);
  bytes.loss = bytes.total - bytes.words - bytes.meta - bytes.regions;
  return out;
}

EpBytes EpGroup::bytes(const ExpertMap& map, const EpLimits& limits, const EpOptions& options) {
  return ep_layout(map, limits, options).bytes;
}

EpGroup::EpGroup(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

EpGroup EpGroup::create(comm::Communicator& comm, ExpertMap map, const EpLimits& limits,
                        const EpOptions& options) {
  MOIETY_CHECK(map.ranks() == comm.size(),
               "ep, group \"{}\": the map has {} ranks, the communicator {}", options.name,
               map.ranks(), comm.size());
  EpGroup out(std::make_shared<Impl>(comm, std::move(map), options));
  out.reserve(limits);
  return out;
}

void EpGroup::reserve(const EpLimits& limits) {
  Impl& g = *impl_;
  MOIETY_CHECK(g.state != Impl::State::kClosed, "ep, group \"{}\": closed", name());
  g.check_poison();
  g.last.wait();
  const std::string mine = describe(g.map, limits, g.options);
  const std::vector<std::string> all = g.comm->bootstrap().all_gather(mine);
  for (size_t r = 1; r < all.size(); ++r) {
    if (all[r] != all[0]) {
      fail(ErrorKind::kComm, "ep: rank 0 asks for {}; rank {} asks for {}", all[0], r, all[r]);
    }
  }
  const bool open = g.state == Impl::State::kOpen;
  if (open && fits(limits, g.limits)) return;
  g.allocate(open ? larger(limits, g.limits) : limits);
}

// All ranks are between operations here: they have exchanged their limits.
void EpGroup::Impl::allocate(const EpLimits& wanted) {
  const EpLayout next = ep_layout(map, wanted, options);
  auto fresh = comm::SymmetricBuffer::create(*comm, options.name, next.bytes.total);
  comm::SymmetricBuffer old = std::exchange(memory, fresh);
  limits = wanted;
  layout = next;
  state = State::kOpen;
  for (int r = 0; r < ranks(); ++r) word(rank, layout.credit, r) = static_cast<uint64_t>(running);
  comm->barrier();
  old.close();
}

void EpGroup::release() {
  Impl& g = *impl_;
  MOIETY_CHECK(g.state != Impl::State::kClosed, "ep, group \"{}\": closed", name());
  g.check_poison();
  g.last.wait();
  if (g.state == Impl::State::kReleased) return;
  g.memory.close();
  g.state = Impl::State::kReleased;
  g.limits = {};
  g.layout = {};
}

void EpGroup::close() {
  Impl& g = *impl_;
  if (g.state == Impl::State::kClosed) return;
  g.last.wait();
  g.state = Impl::State::kClosed;
  g.memory.close();
}

void EpGroup::check() const { impl_->check_poison(); }

void EpGroup::check(Epoch epoch) {
  Impl& g = *impl_;
  g.last.wait();
  g.check_poison();
  const auto end = std::find_if(g.errors.begin(), g.errors.end(),
                                [&](const RecordedError& e) { return e.epoch > epoch; });
  if (end == g.errors.begin()) return;
  const std::string first = g.errors.front().text;
  g.errors.erase(g.errors.begin(), end);
  throw Error(ErrorKind::kInvalidArgument, first);
}

void EpGroup::take_report(TensorView report, Stream stream) {
  check_tensor("ep take_report", "report", report, DType::kInt64, {3});
  stream.run([impl = impl_, report] {
    for (int i = 0; i < 3; ++i) {
      report.data<int64_t>()[i * report.stride(0)] = std::exchange(impl->report[i], 0);
    }
  });
}

const std::string& EpGroup::name() const { return impl_->options.name; }
int EpGroup::rank() const { return impl_->rank; }
int EpGroup::ranks() const { return impl_->ranks(); }
const ExpertMap& EpGroup::map() const { return impl_->map; }
const EpLimits& EpGroup::limits() const { return impl_->limits; }
EpBytes EpGroup::bytes() const { return impl_->layout.bytes; }
Epoch EpGroup::epoch() const { return impl_->issued; }

}  // namespace moiety::moe
