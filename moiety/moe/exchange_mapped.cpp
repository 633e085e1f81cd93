#include "moiety/moe/exchange_mapped.h"

#include <algorithm>
#include <cstring>

#include "moiety/base/error.h"
#include "moiety/comm/flags.h"
#include "moiety/comm/wait.h"

namespace moiety::moe {
namespace {

constexpr int64_t kPage = 4096;
// addr: {number of the attached buffer, offset in it} of an operand's first row, or that it is in
// none.
constexpr int kOffsetBits = 48;
constexpr uint64_t kStaged = ~uint64_t{0};

}  // namespace

MappedLayout mapped_layout(const ExpertMap& map, const EpLimits& l, const EpOptions& o) {
  const int64_t ranks = map.ranks();
  MappedLayout out;
  EpBytes& bytes = out.bytes = record_sizes(map, l, o, kMostMappedRanks);
  out.chunks = ceil_div(rows_max(l), o.chunk_rows);
  const int64_t record = l.staged ? std::max(bytes.record, bytes.record_reduce)
                                  : largest_rest(l.widest, l.model, l.topk);
  out.half = (ranks - 1) * rows_max(l) * record;
  if (ranks > 1 && l.staged) out.half = std::max(out.half, l.tokens * l.topk * bytes.pair);
  out.message = head_bytes(map.experts(), map.ranks()) + rows_max(l) * routing_bytes(l.topk);
  bytes.regions = l.depth * out.half;
  bytes.meta = l.depth * (ranks - 1) * out.message;

  int64_t end = 0;
  const auto place = [&](int64_t& where, int64_t size) {
    where = end;
    end += round_up(size, 128);
  };
  place(out.addr, 8 * l.depth * ranks);
  place(out.pitch, 8 * l.depth * ranks);
  place(out.width, 8 * l.depth * ranks);
  place(out.plan, 8 * l.depth * ranks);
  place(out.head, 8 * l.depth * ranks);
  place(out.ready, 8 * l.depth * ranks * (out.chunks + 1));
  place(out.credit, 8 * ranks);
  place(out.poison, 8);
  place(out.reason, 8 * kReasonWords * ranks);
  bytes.words = end;
  place(out.meta, bytes.meta);
  place(out.regions, bytes.regions);
  bytes.total = round_up(end, kPage);
  bytes.loss = bytes.total - bytes.words - bytes.meta - bytes.regions;
  return out;
}

void MappedExchange::allocate(const EpLimits& limits) {
  const MappedLayout next = mapped_layout(map_, limits, options_);
  auto fresh = comm::SymmetricBuffer::create(comm_, name(), next.bytes.total);
  comm::SymmetricBuffer old = std::exchange(memory_, fresh);
  limits_ = limits;
  layout_ = next;
  bytes_ = next.bytes;
  for (int r = 0; r < ranks(); ++r) word(rank(), layout_.credit, r) = static_cast<uint64_t>(epoch_);
  comm_.barrier();
  old.close();
}

void MappedExchange::release() {
  memory_.close();
  limits_ = {};
  layout_ = {};
  bytes_ = {};
}

std::string MappedExchange::failure() const {
  if (!memory_) return {};
  const uint64_t p = comm::load_acquire(word(rank(), layout_.poison, 0));
  if (p == 0) return {};
  const std::string own = Exchange::failure();
  if (!own.empty()) return own;
  return stopped_text(name(), p, &word(rank(), layout_.reason, kReasonWords * origin_of(p)));
}

// The word that tells peers where the operand lies, if they may reach it there.
uint64_t MappedExchange::own_address() const {
  const int place = may_be_direct_ ? place_of(operand_) : -1;
  if (place < 0) return kStaged;
  return uint64_t(place) << kOffsetBits | uint64_t(operand_.base - attached_[place].local());
}

void MappedExchange::enter() {
  const Epoch freed = epoch_ - limits_.depth;
  for (int i = 0; i + 1 < ranks(); ++i) {
    const int r = peer(i);
    if (!wait(word(rank(), layout_.credit, r), 0, freed, {.from = r})) return;
  }
  const uint64_t address = own_address();
  if (address != kStaged) direct_R_[rank()] = operand_;
  for (int i = 0; i + 1 < ranks(); ++i) {
    const int r = peer(i);
    before_store();
    comm::store_relaxed(entry_word(r, layout_.addr, rank()), address);
    comm::store_relaxed(entry_word(r, layout_.pitch, rank()), uint64_t(operand_.stride));
    comm::store_relaxed(entry_word(r, layout_.width, rank()), uint64_t(entry_.row_bytes));
    comm::store_relaxed(entry_word(r, layout_.plan, rank()), uint64_t(entry_.plan));
    post(entry_word(r, layout_.head, rank()), entry_.word);
  }
}

void MappedExchange::leave() {
  for (int i = 0; i + 1 < ranks(); ++i) {
    post(word(peer(i), layout_.credit, rank()), uint64_t(epoch_));
  }
  if (!pulls_ || !direct(rank())) return;
  // Homes read the rows of this rank: they stay as they are until all homes have ended.
  for (int i = 0; i + 1 < ranks(); ++i) {
    if (!wait(word(rank(), layout_.credit, peer(i)), 0, epoch_, {.from = peer(i)})) return;
  }
}

void MappedExchange::find_direct() {
  if (!may_be_direct_) return;
  for (int i = 0; i + 1 < ranks(); ++i) {
    const int r = peer(i);
    if (!meet(r)) return;
    const uint64_t address = comm::load_relaxed(entry_word(rank(), layout_.addr, r));
    if (address == kStaged) continue;
    const int64_t offset = address & ((uint64_t{1} << kOffsetBits) - 1);
    const auto pitch = comm::load_relaxed(entry_word(rank(), layout_.pitch, r));
    direct_R_[r] = {.base = attached_[address >> kOffsetBits].peer(r) + offset,
                    .stride = static_cast<int64_t>(pitch),
                    .bytes = operand_.bytes};
  }
}

std::byte* MappedExchange::message(int at, int from) const {
  const int64_t slot = from < at ? from : from - 1;
  return memory_.peer(at) + layout_.meta + (half() * (ranks() - 1) + slot) * layout_.message;
}

void MappedExchange::place() {
  const auto records = [&](int at, int from) {
    if (box_ == Box::kRouting) return message(at, from) + head_bytes(map_.experts(), ranks());
    const int64_t slot = box_ == Box::kPairs ? 0 : from < at ? from : from - 1;
    return memory_.peer(at) + layout_.regions + half() * layout_.half +
           slot * rows_max() * stride_R_[at];
  };
  for (int i = 0; i + 1 < ranks(); ++i) {
    const int r = peer(i);
    out_R_[r] = records(r, rank());
    in_R_[r] = records(rank(), r);
    pairs_in_ = in_R_[r];
  }
}

void MappedExchange::post(uint64_t& word, uint64_t value) const {
  before_store();
  comm::store_release(word, value);
}

uint64_t& MappedExchange::entry_word(int at, int64_t array, int from) const {
  return word(at, array, half() * ranks() + from);
}

uint64_t& MappedExchange::ready_word(int at, int from, int64_t chunk) const {
  return word(at, layout_.ready, (half() * ranks() + from) * (layout_.chunks + 1) + chunk);
}

void MappedExchange::announce(int to, int64_t chunk) {
  post(ready_word(to, rank(), chunk), entry_.word);
}

// Chunks without a live row, too, must have come before their half is given back, and a peer that
// sends nothing must have said that it runs the same operation. Rows that are read from their owner
// are complete when it has entered.
void MappedExchange::transfer(std::span<const int64_t> received_R) {
  if (box_ == Box::kRouting) return;  // they came before the heads
  for (int i = 0; i + 1 < ranks(); ++i) {
    const bool pulled = pulls_ && direct(peer(i));
    const int64_t of = pulled ? 0 : chunks(received_R[peer(i)]);
    for (int64_t chunk = 0; chunk < of; ++chunk) {
      if (!await(peer(i), chunk, of)) return;
    }
    if (!meet(peer(i))) return;
  }
}

bool MappedExchange::await(int from, int64_t chunk, int64_t of) {
  return wait(ready_word(rank(), from, chunk), kSignatureBits, epoch_,
              {.from = from, .chunk = chunk, .of = of});
}

void MappedExchange::send_head(const std::byte* head) {
  for (int i = 0; i + 1 < ranks(); ++i) {
    before_store();
    std::memcpy(message(peer(i), rank()), head, head_bytes(map_.experts(), ranks()));
    announce(peer(i), layout_.chunks);
  }
}

const std::byte* MappedExchange::await_head(int from) {
  return await(from, layout_.chunks, 0) ? message(rank(), from) : nullptr;
}

// The peer's entry of this epoch, of which a head or a later word has been seen.
Entry MappedExchange::entry_of(int peer, uint64_t head) const {
  return {head, static_cast<int64_t>(comm::load_relaxed(entry_word(rank(), layout_.width, peer))),
          static_cast<Epoch>(comm::load_relaxed(entry_word(rank(), layout_.plan, peer)))};
}

// Whether the peer is in this epoch with another entry.
bool MappedExchange::differs(int peer, uint64_t head) const {
  return epoch_of(head) == epoch_ && entry_of(peer, head) != entry_;
}

// Returns when the peer is in this epoch, too; false unless it runs the same operation.
bool MappedExchange::meet(int peer) {
  uint64_t& head = entry_word(rank(), layout_.head, peer);
  if (!wait(head, kSignatureBits, epoch_, {.from = peer})) return false;
  if (differs(peer, entry_.word)) poison_mismatch(peer, entry_of(peer, entry_.word));
  return !failed();
}

// Waits until the word's epoch (its bits from `shift` on) is at least `wanted`. A peer that has
// entered this epoch with another entry will never post the word.
bool MappedExchange::wait(uint64_t& word, int shift, Epoch wanted, const Awaited& awaited) {
  if (failed()) return false;
  uint64_t& head = entry_word(rank(), layout_.head, awaited.from);
  uint64_t seen = 0, entered = 0;
  const auto done = [&] {
    seen = comm::load_acquire(word);
    if (static_cast<Epoch>(seen >> shift) >= wanted) return true;
    entered = comm::load_acquire(head);
    return differs(awaited.from, entered);
  };
  const auto stand = [&] {
    const WaitSpan span(TraceLane::kEp, "wait", {{"for rank", awaited.from}});
    return comm::wait_until(done, {.deadline = options_.deadline,
                                   .bootstrap = &comm_.bootstrap(),
                                   .poison = &this->word(rank(), layout_.poison, 0)});
  };
  const comm::WaitResult result = done() ? comm::WaitResult::kReady : stand();
  switch (result) {
    case comm::WaitResult::kReady:
      break;
    case comm::WaitResult::kPoisoned:
      stop(failure());
      return false;
    case comm::WaitResult::kAborted:
      poison(Failure::kAborted, awaited.from,
             text("ep {}, group \"{}\", epoch {}: rank {} stopped: {}", op_name(entry_.word),
                  name(), epoch_, rank(), comm_.bootstrap().aborted().value_or("")));
      return false;
    case comm::WaitResult::kExpired:
      poison(Failure::kLate, awaited.from, late_text(seen, shift, wanted, awaited));
      return false;
  }
  if (static_cast<Epoch>(seen >> shift) < wanted) {
    poison_mismatch(awaited.from, entry_of(awaited.from, entered));
    return false;
  }
  if (shift == 0 || seen == entry_.word) return true;
  if (epoch_of(seen) == epoch_) {
    poison_mismatch(awaited.from, entry_of(awaited.from, seen));
  } else {
    poison(Failure::kProtocol, awaited.from,
           text("ep {}, group \"{}\", epoch {}: rank {} sees a flag of rank {} of epoch {}",
                op_name(entry_.word), name(), epoch_, rank(), awaited.from, epoch_of(seen)));
  }
  return false;
}

std::string MappedExchange::late_text(uint64_t word, int shift, Epoch wanted,
                                      const Awaited& awaited) const {
  uint64_t newest = 0;
  for (int h = 0; h < limits_.depth; ++h) {
    const int64_t from = h * ranks() + awaited.from;
    newest = std::max(newest, comm::load_acquire(this->word(rank(), layout_.head, from)));
  }
  return moe::late_text(name(), options_.deadline.count(),
                        {.rank = rank(),
                         .awaited = awaited,
                         .entered = entry_.word,
                         .word = word,
                         .newest = newest,
                         .wanted = wanted,
                         .shift = shift});
}

void MappedExchange::spread_poison(Failure failure, int about) {
  const uint64_t value = poison_word(failure, rank(), about, epoch_);
  const uint64_t head = comm::load_acquire(entry_word(rank(), layout_.head, about));
  const Entry entries[] = {entry_, entry_of(about, head)};
  for (int r = 0; r < ranks(); ++r) {
    // Every rank sees an abort itself, with its reason.
    if (failure == Failure::kAborted && r != rank()) continue;
    int64_t at = kReasonWords * rank();
    for (const Entry& e : entries) {
      for (const uint64_t value : {e.word, uint64_t(e.row_bytes), uint64_t(e.plan)}) {
        comm::store_relaxed(word(r, layout_.reason, at++), value);
      }
    }
    uint64_t& word = this->word(r, layout_.poison, 0);
    if (comm::load_relaxed(word) == 0) comm::store_release(word, value);
  }
}

}  // namespace moiety::moe
