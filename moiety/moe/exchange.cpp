#include "moiety/moe/exchange.h"

#include <algorithm>

#include "moiety/base/check_devices.h"
#include "moiety/base/cuda_built.h"
#include "moiety/base/error.h"
#include "moiety/base/gpu.h"
#include "moiety/moe/exchange_cuda.h"
#include "moiety/moe/gpu_exchange.h"
#include "moiety/moe/peers/exchange_text.h"
#include "moiety/moe/peers/peer_exchange.h"

namespace moiety::moe {
namespace {

// Bytes of an element of rows that can be summed; 0 for quantized rows.
int64_t sum_bytes(PayloadFormat format) {
  return format == PayloadFormat::kFP32 ? 4 : format > PayloadFormat::kFP32 ? 0 : 2;
}

}  // namespace

uint64_t Signature::bits() const {
  return static_cast<uint64_t>(op) | static_cast<uint64_t>(format) << 3 | uint64_t{weights} << 6 |
         static_cast<uint64_t>(reduction) << 7 | uint64_t{early} << 9;
}

bool Signature::pulls() const {
  const bool sums = op == OpKind::kCombine || op == OpKind::kDispatchBackward;
  return sums && reduction == Reduction::kToken && !weights;
}

bool Signature::may_be_direct() const {
  return (op == OpKind::kDispatch && !early) || (op == OpKind::kCombineBackward && !weights) ||
         pulls();
}

EpBytes record_sizes(const ExpertMap& map, const EpLimits& l, const EpOptions& o, int most_ranks) {
  const auto in = [&](const char* what, int64_t value, int64_t low, int64_t high) {
    MOIETY_CHECK(value >= low && value <= high, "ep, group \"{}\": {} {} is outside [{}, {}]",
                 o.name, what, value, low, high);
  };
  in("ranks", map.ranks(), 1, most_ranks);
  in("tokens", l.tokens, 0, INT32_MAX);
  in("model", l.model, 1, int64_t{1} << 40);
  in("topk", l.topk, 1, kMaxTopk);
  in("depth", l.depth, 1, kMostDepth);
  in("peer_rows", l.peer_rows, 0, INT32_MAX);
  in("chunk_rows", o.chunk_rows, 1, INT32_MAX);
  in("ranks x tokens x topk", map.ranks() * l.tokens * l.topk, 0, INT32_MAX);
  // The product is far below 2^63 for any real memory; one that is not is caught here.
  const double regions = 2.0 * map.ranks() * l.tokens * l.topk * (4.0 * l.model + 256);
  MOIETY_CHECK(regions < 0x1p62, "ep, group \"{}\": {} tokens of {} elements are too many", o.name,
               l.tokens, l.model);

  const int64_t b = sum_bytes(l.widest);
  EpBytes out;
  out.record = largest_record(l.widest, l.model, l.topk);
  out.record_reduce = RowParts{l.model * (l.rank_fp32 ? 4 : b)}.record(l.topk);
  out.pair = l.token_order ? pair_record_bytes(l.model * b) : 0;
  return out;
}

Exchange::Exchange(comm::Communicator& comm, const ExpertMap& map, const EpOptions& options)
    : comm_(comm), map_(map), options_(options), rank_(comm.rank()) {
  const auto ranks = static_cast<size_t>(map.ranks());
  direct_R_.resize(ranks);
  stride_R_.resize(ranks);
  sent_R_.resize(ranks);
  out_R_.resize(ranks);
  in_R_.resize(ranks);
}

std::string Exchange::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

int Exchange::place_of(const comm::SymmetricBuffer& buffer) const {
  for (size_t i = 0; i < attached_.size(); ++i) {
    if (attached_[i] && buffer && attached_[i].local() == buffer.local()) return int(i);
  }
  return -1;
}

int Exchange::place_of(const Operand& operand) const {
  const int64_t bytes = (operand.rows - 1) * operand.stride + operand.bytes;
  for (size_t i = 0; i < attached_.size(); ++i) {
    if (operand.rows > 0 && attached_[i].contains(operand.base, bytes)) return int(i);
  }
  return -1;
}

void Exchange::begin(const Signature& signature, const Operand& operand) {
  ++epoch_;
  operand_ = operand;
  pulls_ = signature.pulls();
  may_be_direct_ = options_.zero_copy == ZeroCopy::kAuto && signature.may_be_direct();
  std::fill(direct_R_.begin(), direct_R_.end(), Operand());
  sent_bytes_ = 0;
  entry_ = {uint64_t(epoch_) << kSignatureBits | signature.bits(), signature.row_bytes,
            signature.plan};
  failed_ = !failure().empty();
  if (!failed()) enter();
}

void Exchange::begin_beside(const Signature& signature) {
  aside_ = *this;
  begin(signature);
}

void Exchange::open(Box box, int64_t stride, std::span<const int64_t> sent_R,
                    int64_t direct_stride) {
  box_ = box;
  std::copy(sent_R.begin(), sent_R.end(), sent_R_.begin());
  sent_R_[rank()] = 0;
  find_direct();
  for (int r = 0; r < ranks(); ++r) {
    const bool stores = direct(r) && !pulls_;
    stride_R_[r] = stores ? direct_stride : stride;
    sent_bytes_ += sent_R_[r] * (stride_R_[r] + (stores ? direct_R_[r].bytes : 0));
  }
  place();
}

void Exchange::finish() {
  if (!failed()) leave();
  if (failed()) throw_error(ErrorKind::kComm, failure());
}

void Exchange::before_store() const {
  if (options_.before_store) options_.before_store();
}

void Exchange::poison(Failure failure, int about, const std::string& why) {
  failed_ = true;
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) return;
    failure_ = why;
  }
  spread_poison(failure, about);
}

void Exchange::stop(const std::string& why) {
  failed_ = true;
  const std::lock_guard lock(mutex_);
  if (failure_.empty()) failure_ = why;
}

void Exchange::poison_mismatch(int peer, const Entry& entry) {
  poison(Failure::kMismatch, peer, mismatch_text(name(), rank(), entry_, peer, entry));
}

void EpGroup::Impl::check_poison() const {
  if (state == State::kClosed) return;
  const std::string why = peers ? peers->failure() : exchange ? exchange->failure() : "";
  if (!why.empty()) throw_error(ErrorKind::kComm, why);
}

void EpGroup::Impl::check_usable(const char* operation) const {
  MOIETY_CHECK(state != State::kClosed, "{}, group \"{}\": closed", operation, options.name);
  MOIETY_CHECK(state != State::kReleased, "{}, group \"{}\": released, reserve it first", operation,
               options.name);
  check_poison();
}

void EpGroup::Impl::check_stream(const char* operation, const Stream& stream) const {
  MOIETY_CHECK(stream.device() == options.device,
               "{}, group \"{}\": the stream is on {}, the group on {}", operation, options.name,
               moiety::name(stream.device()), moiety::name(options.device));
}

Stream side_stream(EpGroup& group) {
  EpGroup::Impl& g = *group.impl();
  if (!g.on_gpu()) return Stream::deferred();
  if (!g.side) g.side = Stream::on(g.options.device);
  return *g.side;
}

void begin_beside(EpGroup& group, const Stream& side) {
  if (const auto& peers = group.impl()->peers) peers->set_apart(side);
}
void end_beside(EpGroup& group, const Stream& main) {
  if (const auto& peers = group.impl()->peers) peers->join(main);
}

int sms_beside(const EpGroup& group) {
  const EpGroup::Impl& g = *group.impl();
  if (!g.peers || g.options.comm_sms == 0) return 0;
  const int all = gpu_properties(g.options.device.index).multiprocessors;
  return all - std::min(g.options.comm_sms, all / 2);
}

TensorView waited_ns(const EpGroup& group) {
  const EpGroup::Impl& g = *group.impl();
  if (!g.peers) return {};
  return {g.peers->waited_ns(), DType::kInt64, {1}, g.options.device};
}

void EpGroup::Impl::wait() const {
  if (peers) return peers->wait(last_stream);
  on_gpu() ? last_stream.synchronize() : last.wait();
}

void check_plan(const char* operation, const EpGroup& group, const EpPlan& plan,
                const Stream& stream) {
  const EpGroup::Impl& g = *group.impl();
  g.check_usable(operation);
  g.check_stream(operation, stream);
  check_device(operation, "plan", plan.info, stream);
  MOIETY_CHECK(plan.rows_RR.defined() && plan.rows_RR.size(0) == g.map.ranks() &&
                   plan.count_RE.size(1) == g.map.experts(),
               "{}, group \"{}\": the plan is not one of this group's", operation, group.name());
  MOIETY_CHECK(
      plan.tokens_max <= g.limits.tokens && plan.topk <= g.limits.topk,
      "{}, group \"{}\": the plan is for up to {} tokens with K={}, reserved are {} with {}",
      operation, group.name(), plan.tokens_max, plan.topk, g.limits.tokens, g.limits.topk);
  MOIETY_CHECK(plan.rows_max <= rows_max(g.limits),
               "{}, group \"{}\": the plan is for up to {} rows to a rank, reserved are {} "
               "(EpLimits peer_rows)",
               operation, group.name(), plan.rows_max, rows_max(g.limits));
}

void check_staging(const EpGroup& group, const Signature& signature, const Operand& operand) {
  const EpGroup::Impl& g = *group.impl();
  const bool stages = g.limits.staged || g.map.ranks() == 1 || signature.op == OpKind::kPrepare ||
                      group.transport() != EpTransport::kMapped;
  if (stages) return;
  const auto reaches = [&] {
    return g.peers ? g.peers->reaches(operand) : g.exchange->place_of(operand) >= 0;
  };
  const bool direct = g.options.zero_copy == ZeroCopy::kAuto && signature.may_be_direct() &&
                      (operand.rows == 0 || reaches());
  if (direct) return;
  fail(ErrorKind::kUnsupported,
       "ep {}, group \"{}\": peers cannot reach these rows, and no memory is reserved for rows on "
       "their way (EpLimits staged)",
       op_name(signature.bits()), group.name());
}

void check_record(const char* operation, const EpGroup& group, const Payload& rows, int64_t bytes) {
  const EpBytes& reserved = group.impl()->bytes();
  const int64_t have = std::max(reserved.record, reserved.record_reduce);
  MOIETY_CHECK(bytes <= have,
               "{}, group \"{}\": {} needs {} bytes a row, reserved are {} (EpLimits model, topk, "
               "widest, rank_fp32)",
               operation, group.name(), describe(rows), bytes, have);
}

}  // namespace moiety::moe
