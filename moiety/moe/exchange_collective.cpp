#include "moiety/moe/exchange_collective.h"

#include <algorithm>
#include <cstring>
#include <unistd.h>

#include "moiety/base/error.h"
#include "moiety/comm/agree.h"

namespace moiety::moe {
namespace {

constexpr int64_t kGreetingBytes = 32;

TensorView bytes_at(std::byte* base, int64_t rows, int64_t row_bytes) {
  return {base, DType::kUInt8, {rows, row_bytes}};
}

int64_t physical_memory() {
  return int64_t{sysconf(_SC_PHYS_PAGES)} * int64_t{sysconf(_SC_PAGESIZE)};
}

}  // namespace

CollectiveLayout collective_layout(const ExpertMap& map, const EpLimits& l, const EpOptions& o) {
  CollectiveLayout out;
  EpBytes& bytes = out.bytes = record_sizes(map, l, o, kMostCollectiveRanks);
  const int64_t ranks = map.ranks(), rows = (ranks - 1) * rows_max(l);
  const int64_t record =
      rows * std::max({bytes.record, bytes.record_reduce, routing_bytes(l.topk)});
  // An owner may have all pairs of its rows; a home gets each of its own pairs at most once.
  const int64_t sent = std::max(record, rows * l.topk * bytes.pair);
  const int64_t received = std::max(record, std::min(rows, l.tokens) * l.topk * bytes.pair);

  int64_t end = 0, used = 0;
  const auto place = [&](int64_t& where, int64_t size) {
    where = end;
    used += size;
    end += round_up(size, 128);
  };
  place(out.greetings, 2 * ranks * kGreetingBytes);
  place(out.heads, ranks * head_bytes(map.experts(), map.ranks()));
  place(out.places, l.token_order ? 4 * l.tokens * l.topk : 0);
  bytes.meta = used;
  place(out.sent, sent);
  place(out.received, received);
  bytes.regions = sent + received;
  bytes.total = end;
  bytes.loss = end - used;
  return out;
}

CollectiveExchange::CollectiveExchange(comm::Communicator& comm, const ExpertMap& map,
                                       const EpOptions& options)
    : Exchange(comm, map, options),
      own_(comm.split(0, comm.rank(), options.name)),
      received_R_(map.ranks()) {
  static_assert(sizeof(Greeting) == kGreetingBytes);
}

void CollectiveExchange::allocate(const EpLimits& limits) {
  const CollectiveLayout next = collective_layout(map_, limits, options_);
  Buffer fresh;
  std::string error;
  try {
    // More than the machine has may well be granted, and the process be killed when it is touched.
    if (next.bytes.total > physical_memory()) {
      fail(ErrorKind::kOutOfMemory, "more than the machine has");
    }
    fresh = Buffer(next.bytes.total, "expert parallelism", 128);
  } catch (const Error&) {
    error = text("ep, group \"{}\": rank {} could not allocate {}: out of memory", name(), rank(),
                 bytes_text(next.bytes.total));
  }
  comm::agree(comm_.bootstrap(), error, ErrorKind::kOutOfMemory);
  memory_ = std::move(fresh);
  limits_ = limits;
  layout_ = next;
  bytes_ = next.bytes;
  std::byte* places = limits.token_order ? memory_.data() + layout_.places : nullptr;
  place_of_pair_ = reinterpret_cast<int32_t*>(places);
}

void CollectiveExchange::release() {
  comm::agree(comm_.bootstrap(), "");  // nobody is in an operation any more
  memory_ = {};
  limits_ = {};
  layout_ = {};
  bytes_ = {};
  place_of_pair_ = nullptr;
}

CollectiveExchange::Greeting* CollectiveExchange::greetings() const {
  return reinterpret_cast<Greeting*>(memory_.data() + layout_.greetings);
}

template <class Collective>
bool CollectiveExchange::run(Collective&& collective) {
  if (failed()) return false;
  before_store();
  const WaitSpan span(TraceLane::kEp, "wait");
  try {
    collective(*own_).wait();
    return true;
  } catch (const Error& e) {
    const std::string before =
        previous_ == 0 ? ""
                       : text("; last together in {}, {}", op_name(previous_), epoch_of(previous_));
    poison(Failure::kLate, rank(),
           text("ep {}, group \"{}\", epoch {}: {}{}", op_name(entry_.word), name(), epoch_,
                e.what(), before));
    return false;
  }
}

// Tells every rank the operation that this one runs and the number of records it will send there,
// and learns the same of them.
bool CollectiveExchange::greet() {
  Greeting *to = greetings(), *from = to + ranks();
  for (int r = 0; r < ranks(); ++r) to[r] = {entry_, sent_R_[r]};
  const std::vector<int64_t> one_each(ranks(), 1);
  const auto view = [&](Greeting* g) {
    return bytes_at(reinterpret_cast<std::byte*>(g), ranks(), kGreetingBytes);
  };
  const bool done = run([&](comm::Communicator& c) {
    return c.all_to_all(view(to), one_each, view(from), one_each, {});
  });
  for (int r = 0; done && r < ranks(); ++r) {
    if (from[r].entry != entry_) {
      poison_mismatch(r, from[r].entry);
      return false;
    }
    received_R_[r] = from[r].records;
  }
  return done;
}

void CollectiveExchange::place() {
  std::byte* here = memory_.data() + layout_.sent;
  for (int r = 0; r < ranks(); ++r) {
    out_R_[r] = here;
    here += sent_R_[r] * stride_R_[r];
  }
}

void CollectiveExchange::send_head(const std::byte* head) {
  if (!greet()) return;
  const int64_t bytes = head_bytes(map_.experts(), ranks());
  std::byte* heads = memory_.data() + layout_.heads;
  std::memcpy(heads + rank() * bytes, head, bytes);
  run([&](comm::Communicator& c) {
    return c.all_gather(bytes_at(heads + rank() * bytes, 1, bytes), bytes_at(heads, ranks(), bytes),
                        {});
  });
}

const std::byte* CollectiveExchange::await_head(int from) {
  if (failed()) return nullptr;
  return memory_.data() + layout_.heads + from * head_bytes(map_.experts(), ranks());
}

void CollectiveExchange::transfer(std::span<const int64_t> received_R) {
  if (box_ != Box::kRouting && !greet()) return;  // prepare has greeted with its head
  // Only their owners know how many pairs there are. Rows must be as many as the plan says, or the
  // communicator finds that out.
  if (box_ != Box::kPairs) {
    std::copy(received_R.begin(), received_R.end(), received_R_.begin());
    received_R_[rank()] = 0;
  }
  int64_t sent = 0, received = 0;
  const int64_t stride = stride_R_[rank()];  // equal for all ranks
  std::byte* const base = memory_.data() + layout_.received;
  for (int r = 0; r < ranks(); ++r) {
    in_R_[r] = base + received * stride;
    sent += sent_R_[r];
    received += received_R_[r];
  }
  if (received * stride > bytes_.total - layout_.received) {
    poison(
        Failure::kProtocol, rank(),
        text("ep {}, group \"{}\", epoch {}: {} records come to rank {}, which has room for {} B",
             op_name(entry_.word), name(), epoch_, received, rank(),
             bytes_.total - layout_.received));
    return;
  }
  const bool done = run([&](comm::Communicator& c) {
    return c.all_to_all(bytes_at(memory_.data() + layout_.sent, sent, stride), sent_R_,
                        bytes_at(base, received, stride), received_R_, {});
  });
  if (done && box_ == Box::kPairs) index_pairs();
}

// Pairs come in the order of their owners' rows, and say which they are.
void CollectiveExchange::index_pairs() {
  pairs_in_ = in_R_[0];
  const int64_t number = RowParts{entry_.row_bytes}.side_at() + kPairNumber;
  int32_t place = 0;
  for (int s = 0; s < ranks(); ++s) {
    for (int64_t i = 0; i < received_R_[s]; ++i) {
      int32_t pair;
      std::memcpy(&pair, in(s, i) + number, sizeof(pair));
      if (pair < 0 || pair >= limits_.tokens * limits_.topk) {
        poison(Failure::kProtocol, s,
               text("ep {}, group \"{}\", epoch {}: rank {} sends pair {}, rank {} has {}",
                    op_name(entry_.word), name(), epoch_, s, pair, rank(),
                    limits_.tokens * limits_.topk));
        return;
      }
      place_of_pair_[pair] = place++;
    }
  }
}

}  // namespace moiety::moe
