#include "moiety/moe/exchange.h"

#include <algorithm>

#include "moiety/base/error.h"
#include "moiety/comm/wait.h"

namespace moiety::moe {
namespace {

constexpr int kSignatureBits = 20;
constexpr uint64_t kSignatureMask = (uint64_t{1} << kSignatureBits) - 1;
constexpr uint64_t kStaged = ~uint64_t{0};  // addr: the operand is not in an attached buffer

constexpr const char* kOpNames[] = {"nothing",          "prepare",           "dispatch", "combine",
                                    "combine_backward", "dispatch_backward", "?",        "?"};
constexpr const char* kFormatNames[] = {"bf16", "fp16", "fp32", "?", "?", "?", "?", "?"};
constexpr const char* kReductionNames[] = {"kRank", "kRankFp32", "kToken", "?"};

const char* op_name(uint64_t bits) { return kOpNames[bits & 7]; }

PayloadFormat format_of(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return PayloadFormat::kBF16;
    case DType::kFloat16:
      return PayloadFormat::kFP16;
    default:
      return PayloadFormat::kFP32;
  }
}

// The poison word: {failure, origin, about, epoch}.
uint64_t poison_word(Exchange::Failure failure, int origin, int about, Epoch epoch) {
  return static_cast<uint64_t>(failure) | uint64_t(origin) << 3 | uint64_t(about) << 13 |
         uint64_t(epoch) << 23;
}

std::string poison_text(const std::string& group, uint64_t word) {
  static constexpr const char* kWhy[] = {"",
                                         "which waited for rank {}",
                                         "which runs another operation than rank {}",
                                         "whose prepare differs from that of rank {}",
                                         "which saw a flag of rank {} out of order",
                                         "which saw rank {} abort"};
  return text("ep, group \"{}\", epoch {}: stopped by rank {}, ", group, word >> 23,
              word >> 3 & 1023) +
         text(kWhy[word & 7], word >> 13 & 1023);
}

}  // namespace

uint64_t Signature::bits() const {
  return static_cast<uint64_t>(op) | static_cast<uint64_t>(format_of(dtype)) << 3 |
         uint64_t{weights} << 6 | static_cast<uint64_t>(reduction) << 7 |
         static_cast<uint64_t>(row_bytes % 1021) << 10;
}

std::string describe(uint64_t bits, int64_t row_bytes) {
  const auto op = static_cast<OpKind>(bits & 7);
  if (op == OpKind::kPrepare) return "prepare";
  const bool sums = op == OpKind::kCombine || op == OpKind::kDispatchBackward;
  return text("{}({}, {} B{}{}{})", op_name(bits), kFormatNames[bits >> 3 & 7], row_bytes,
              bits >> 6 & 1 ? ", weights" : "", sums ? ", " : "",
              sums ? kReductionNames[bits >> 7 & 3] : "");
}

void EpGroup::Impl::check_poison() const {
  if (!memory) return;
  const uint64_t p = comm::load_relaxed(word(rank, layout.poison, 0));
  if (p == 0) return;
  const std::lock_guard lock(mutex);
  throw Error(ErrorKind::kComm, failure.empty() ? poison_text(options.name, p) : failure);
}

void EpGroup::Impl::check_usable(const char* operation) const {
  MOIETY_CHECK(state != State::kClosed, "{}, group \"{}\": closed", operation, options.name);
  MOIETY_CHECK(state != State::kReleased, "{}, group \"{}\": released, reserve it first", operation,
               options.name);
  check_poison();
}

Exchange::Exchange(EpGroup::Impl& group, const Signature& signature)
    : group_(group),
      signature_(signature),
      epoch_(++group.running),
      half_(group.half()),
      word_(uint64_t(epoch_) << kSignatureBits | signature.bits()) {
  const EpLayout& at = group.layout;
  if (comm::load_relaxed(group.word(rank(), at.poison, 0)) != 0) failed_ = true;
  const Epoch freed = epoch_ - group.limits.depth;
  for (int i = 0; i + 1 < ranks(); ++i) {
    const int r = peer(i);
    if (!wait(group.word(rank(), at.credit, r), 0, freed, {.from = r})) return;
  }
  const int64_t mine = half_ * ranks() + rank();
  for (int i = 0; i + 1 < ranks(); ++i) {
    const int r = peer(i);
    before_store();
    comm::store_relaxed(group.word(r, at.addr, mine), kStaged);
    comm::store_relaxed(group.word(r, at.width, mine), uint64_t(signature.row_bytes));
    post(group.word(r, at.head, mine), word_);
  }
}

std::byte* Exchange::record(int at, int from, int64_t j, int64_t stride) const {
  const int64_t slot = from < at ? from : from - 1;
  return pair_record(at, slot * group_.limits.tokens + j, stride);
}

std::byte* Exchange::pair_record(int at, int64_t index, int64_t stride) const {
  return group_.memory.peer(at) + group_.layout.regions + half_ * group_.layout.half +
         index * stride;
}

std::byte* Exchange::message(int at, int from) const {
  const int64_t slot = from < at ? from : from - 1;
  return group_.memory.peer(at) + group_.layout.meta +
         (half_ * (ranks() - 1) + slot) * group_.layout.message;
}

void Exchange::before_store() const {
  if (group_.options.before_store) group_.options.before_store();
}

void Exchange::post(uint64_t& word, uint64_t value) const {
  before_store();
  comm::store_release(word, value);
}

void Exchange::announce(int to, int64_t chunk) {
  const int64_t flags = group_.layout.chunks + 1;
  post(group_.word(to, group_.layout.ready, (half_ * ranks() + rank()) * flags + chunk), word_);
}

bool Exchange::await(int from, int64_t chunk, int64_t of) {
  const int64_t flags = group_.layout.chunks + 1;
  uint64_t& word =
      group_.word(rank(), group_.layout.ready, (half_ * ranks() + from) * flags + chunk);
  return wait(word, kSignatureBits, epoch_, {.from = from, .chunk = chunk, .of = of});
}

// Waits until the word's epoch (its bits from `shift` on) is at least `wanted`. A peer that has
// entered this epoch with another signature will never post what is waited for.
bool Exchange::wait(uint64_t& word, int shift, Epoch wanted, const Awaited& awaited) {
  if (failed()) return false;
  uint64_t& head = group_.word(rank(), group_.layout.head, half_ * ranks() + awaited.from);
  const auto same_epoch_other_signature = [&](uint64_t w) {
    return static_cast<Epoch>(w >> kSignatureBits) == epoch_ && w != word_;
  };
  uint64_t seen = 0, entered = 0;
  const auto done = [&] {
    seen = comm::load_acquire(word);
    if (static_cast<Epoch>(seen >> shift) >= wanted) return true;
    entered = comm::load_acquire(head);
    return same_epoch_other_signature(entered);
  };
  const comm::WaitResult result =
      comm::wait_until(done, {.deadline = group_.options.deadline,
                              .bootstrap = &group_.comm->bootstrap(),
                              .poison = &group_.word(rank(), group_.layout.poison, 0)});
  switch (result) {
    case comm::WaitResult::kReady:
      break;
    case comm::WaitResult::kPoisoned:
      failed_ = true;
      return false;
    case comm::WaitResult::kAborted:
      poison(Failure::kAborted, awaited.from,
             text("ep {}, group \"{}\", epoch {}: rank {} stopped: {}", op_name(word_),
                  group_.options.name, epoch_, rank(),
                  group_.comm->bootstrap().aborted().value_or("")));
      return false;
    case comm::WaitResult::kExpired:
      poison(Failure::kLate, awaited.from, late_text(seen, shift, wanted, awaited));
      return false;
  }
  if (static_cast<Epoch>(seen >> shift) < wanted) {
    poison(Failure::kMismatch, awaited.from, mismatch_text(awaited.from, entered));
    return false;
  }
  if (shift == 0 || seen == word_) return true;
  if (same_epoch_other_signature(seen)) {
    poison(Failure::kMismatch, awaited.from, mismatch_text(awaited.from, seen));
  } else {
    poison(Failure::kProtocol, awaited.from,
           text("ep {}, group \"{}\", epoch {}: rank {} sees a flag of rank {} of epoch {}",
                op_name(word_), group_.options.name, epoch_, rank(), awaited.from,
                seen >> kSignatureBits));
  }
  return false;
}

std::string Exchange::late_text(uint64_t word, int shift, Epoch wanted,
                                const Awaited& awaited) const {
  std::string what = text("chunk {} of {}", awaited.chunk + 1, awaited.of);
  if (shift == 0) {
    what = text("credit {}", wanted);
  } else if (awaited.of == 0) {
    what = "its routing";
  }
  uint64_t newest = 0;
  for (int h = 0; h < group_.limits.depth; ++h) {
    newest = std::max(newest, comm::load_acquire(group_.word(rank(), group_.layout.head,
                                                             h * ranks() + awaited.from)));
  }
  const std::string seen = newest == 0 ? text("rank {} not seen yet", awaited.from)
                                       : text("rank {} last seen in {}, {}", awaited.from,
                                              op_name(newest), newest >> kSignatureBits);
  return text(
      "ep {}, group \"{}\", epoch {}: rank {} waited {:.1f} s for rank {}, {} (word at {}); {}",
      op_name(word_), group_.options.name, epoch_, rank(), group_.options.deadline.count(),
      awaited.from, what, word >> shift, seen);
}

std::string Exchange::mismatch_text(int peer, uint64_t seen) const {
  const uint64_t width =
      comm::load_relaxed(group_.word(rank(), group_.layout.width, half_ * ranks() + peer));
  return text("ep, group \"{}\", epoch {}: rank {} runs {}, rank {} runs {}", group_.options.name,
              epoch_, rank(), describe(word_ & kSignatureMask, signature_.row_bytes), peer,
              describe(seen & kSignatureMask, static_cast<int64_t>(width)));
}

void Exchange::poison(Failure failure, int about, const std::string& why) {
  failed_ = true;
  {
    const std::lock_guard lock(group_.mutex);
    if (!group_.failure.empty()) return;
    group_.failure = why;
  }
  const uint64_t value = poison_word(failure, rank(), about, epoch_);
  for (int r = 0; r < ranks(); ++r) {
    // An abort is seen by every rank itself, with its reason.
    if (failure == Failure::kAborted && r != rank()) continue;
    uint64_t& word = group_.word(r, group_.layout.poison, 0);
    if (comm::load_relaxed(word) == 0) comm::store_relaxed(word, value);
  }
}

void Exchange::finish() {
  if (!failed()) {
    for (int i = 0; i + 1 < ranks(); ++i) {
      post(group_.word(peer(i), group_.layout.credit, rank()), uint64_t(epoch_));
    }
    return;
  }
  group_.check_poison();
}

void check_plan(const char* operation, const EpGroup& group, const EpPlan& plan) {
  const EpGroup::Impl& g = *group.impl();
  g.check_usable(operation);
  MOIETY_CHECK(plan.rows_RR.defined() && plan.rows_RR.size(0) == g.ranks() &&
                   plan.count_RE.size(1) == g.map.experts(),
               "{}, group \"{}\": the plan is not one of this group's", operation, group.name());
  MOIETY_CHECK(
      plan.tokens_max <= g.limits.tokens && plan.topk <= g.limits.topk,
      "{}, group \"{}\": the plan is for up to {} tokens with K={}, reserved are {} with {}",
      operation, group.name(), plan.tokens_max, plan.topk, g.limits.tokens, g.limits.topk);
}

void check_rows(const char* operation, const char* argument, const TensorView& x, int64_t rows,
                int64_t model) {
  const bool payload =
      x.dtype() == DType::kBFloat16 || x.dtype() == DType::kFloat16 || x.dtype() == DType::kFloat32;
  if (x.defined() && !payload) {
    fail(ErrorKind::kUnsupported, "{}: {} is {}; rows are bfloat16, float16 or float32", operation,
         argument, x.describe());
  }
  check_tensor(operation, argument, x, x.dtype(), {rows, model});
  MOIETY_CHECK(x.size(0) == 0 || x.size(1) <= 1 || x.stride(1) == 1,
               "{}: {} is {}; a row must be contiguous", operation, argument, x.describe());
}

void check_record(const char* operation, const EpGroup& group, const EpPlan& plan,
                  const TensorView& rows, Reduction reduction) {
  const EpBytes& reserved = group.impl()->layout.bytes;
  const int64_t model = rows.size(1), data = byte_size(rows.dtype(), model);
  if (reduction == Reduction::kToken) {
    MOIETY_CHECK(pair_record_bytes(data) <= reserved.pair,
                 "{}, group \"{}\": kToken of {} needs {} bytes a pair, reserved are {} (EpLimits "
                 "token_order, model, widest)",
                 operation, group.name(), rows.describe(), pair_record_bytes(data), reserved.pair);
    return;
  }
  const int64_t wire = reduction == Reduction::kRankFp32 ? 4 * model : data;
  const int64_t have = std::max(reserved.record, reserved.record_reduce);
  MOIETY_CHECK(record_bytes(wire, plan.topk) <= have,
               "{}, group \"{}\": {} needs {} bytes a row, reserved are {} (EpLimits model, topk, "
               "widest, rank_fp32)",
               operation, group.name(), rows.describe(), record_bytes(wire, plan.topk), have);
}

void issue_sum(EpGroup& group, const EpPlan& plan, const SumNames& names, const SumArgs& args,
               const Stream& stream) {
  const char* op = names.operation;
  check_rows(op, names.y, args.y_CD, plan.capacity, -1);
  const DType dtype = args.y_CD.dtype();
  const int64_t model = args.y_CD.size(1);
  const auto check_home = [&](const char* argument, const TensorView& x) {
    check_rows(op, argument, x, plan.tokens, model);
    MOIETY_CHECK(x.dtype() == dtype || x.dtype() == DType::kFloat32,
                 "{}: {} is {}, {} is {}; float32 or the same type is expected", op, argument,
                 x.describe(), names.y, args.y_CD.describe());
  };
  check_home(names.out, args.out_TD);
  if (args.addend.defined()) check_home("addend", args.addend);
  check_record(op, group, plan, args.y_CD, args.reduction);
  const Signature signature{.op = names.kind,
                            .dtype = dtype,
                            .weights = args.slot_w.defined() || args.side.defined(),
                            .reduction = args.reduction,
                            .row_bytes = byte_size(dtype, model)};
  issue(group, signature, stream,
        [plan, args](Exchange& exchange) { sum_rows(exchange, plan, args); });
}

}  // namespace moiety::moe
