#include "moiety/gtp/transport_mapped.h"

#include <algorithm>
#include <array>
#include <bit>

#include "moiety/base/error.h"
#include "moiety/base/integer.h"
#include "moiety/comm/collective.h"
#include "moiety/comm/flags.h"
#include "moiety/gtp/hash.h"

namespace moiety::gtp {
namespace {

constexpr int64_t kPage = 4096;

// The name of the words that are waited for.
std::string counter_name(int array, int published) {
  constexpr const char* kNames[] = {"drained", "produced", "produced", "consumed", "consumed"};
  if (array < published) return kNames[array];
  return text("published of bucket {}", array - published);
}

// The poison word: {1, about, origin}.
constexpr uint64_t poison_of(int origin, int about) {
  return uint64_t{1} << 63 | uint64_t(about) << 31 | uint64_t(origin);
}
constexpr uint64_t kPoisonRank = (uint64_t{1} << 31) - 1;

}  // namespace

SlotArena::Block MappedTransport::allocate(const std::string& what, int64_t bytes) {
  auto memory = comm::SymmetricBuffer::create(comm_, text("{}, {}", name(), what), bytes);
  blocks_.push_back({memory, allocated_});
  allocated_ += round_up(bytes, kPage);
  return {TensorView(memory.local(), DType::kUInt8, {bytes}),
          std::make_shared<comm::SymmetricBuffer>(memory)};
}

int64_t MappedTransport::place(const void* at, int64_t bytes) const {
  for (const Block& b : blocks_) {
    if (b.memory.contains(at, bytes)) {
      return b.begin + (static_cast<const std::byte*>(at) - b.memory.local());
    }
  }
  return -1;
}

std::byte* MappedTransport::locate(int rank, int64_t place) const {
  const auto after = std::ranges::upper_bound(blocks_, place, {}, &Block::begin);
  const Block& b = *std::prev(after);
  return b.memory.peer(rank) + (place - b.begin);
}

uint64_t MappedTransport::place_of(const SharedBundle& bundle) const {
  Hash hash;
  for (const auto& arrays : bundle.members) {
    for (const TensorView& x : arrays) {
      if (!x.defined()) continue;
      const int64_t at = place(x.raw(), x.bytes());
      MOIETY_CHECK(at >= 0, "gtp \"{}\": bundle \"{}\" is not in memory that peers map", name(),
                   bundle.name);
      hash.add(at);
    }
  }
  return hash.value();
}

void MappedTransport::on_shared() {
  int32_t buckets = 0;
  for (const SharedBundle& b : bundles()) buckets = std::max(buckets, b.bucket + 1);
  seen_.assign(static_cast<size_t>(buckets), 0);
  const int64_t words = int64_t{kPublished + buckets} * ranks() + 1;
  words_ = comm::SymmetricBuffer::create(comm_, text("{}, words", name()), 8 * words);
}

uint64_t& MappedTransport::word(int at, int array, int of) const {
  return reinterpret_cast<uint64_t*>(words_.peer(at))[1 + int64_t{array} * ranks() + of];
}

uint64_t& MappedTransport::poison_word(int at) const {
  return *reinterpret_cast<uint64_t*>(words_.peer(at));
}

void MappedTransport::tell(int array, uint64_t value) const {
  for (int r = 0; r < ranks(); ++r) comm::store_release(word(r, array, rank()), value);
}

std::string MappedTransport::describe(const Waiting& w) const {
  std::string out = text("gtp \"{}\", {} of {}", name(), w.edge, w.operation);
  if (w.bundle == kNoBundle) return out;
  return out + text(" {} on lane \"{} {}\", bundle \"{}\"", w.number, w.expert ? "expert" : "dense",
                    w.operation, bundle(w.bundle).name);
}

void MappedTransport::await(int array, uint64_t value, const Waiting& waiting) {
  for (int i = 1; i < ranks(); ++i) {
    await_peer((rank() + i) % ranks(), array, value, waiting);
  }
}

void MappedTransport::await_peer(int peer, int array, uint64_t value, const Waiting& waiting) {
  check();
  uint64_t& counter = word(rank(), array, peer);
  if (comm::load_acquire(counter) >= value) return;
  const WaitSpan span(axis(), "gtp wait", {{"for rank", peer}});
  uint64_t& poison = poison_word(rank());
  switch (comm::wait_at_least(
      counter, value,
      {.deadline = options_.deadline, .bootstrap = &comm_.bootstrap(), .poison = &poison})) {
    case comm::WaitResult::kReady:
      return;
    case comm::WaitResult::kExpired:
      for (int r = 0; r < ranks(); ++r) {
        if (comm::load_relaxed(poison_word(r)) != 0) continue;
        comm::store_relaxed(poison_word(r), poison_of(rank(), peer));
      }
      fail_with(text("{}: rank {} waited {:.1f} s for rank {} ({} at {}, expected {})",
                     describe(waiting), rank(), options_.deadline.count(), peer,
                     counter_name(array, kPublished), comm::load_relaxed(counter), value));
    case comm::WaitResult::kPoisoned: {
      const uint64_t p = comm::load_relaxed(poison);
      fail_with(text("{}: rank {} was stopped by rank {}, which waited for rank {}",
                     describe(waiting), rank(), p & kPoisonRank, p >> 31 & kPoisonRank));
    }
    case comm::WaitResult::kAborted:
      fail_with(text("{}: rank {} stopped waiting for rank {}: {}", describe(waiting), rank(), peer,
                     comm_.bootstrap().aborted().value_or("")));
  }
}

void MappedTransport::publish(int32_t bucket, const Stream& stream) {
  MOIETY_CHECK(bucket >= 0 && bucket < static_cast<int32_t>(seen_.size()),
               "gtp \"{}\": bucket {} of {} is published", name(), bucket, seen_.size());
  stream.run([=, this] { tell(kPublished + bucket, own(kPublished + bucket) + 1); });
}

void MappedTransport::await_published(const SharedBundle& b, const Waiting& waiting) {
  const int array = kPublished + b.bucket;
  const uint64_t version = own(array);
  uint64_t& seen = seen_[static_cast<size_t>(b.bucket)];
  if (seen >= version) return;
  await(array, version, waiting);
  seen = version;
}

std::vector<const std::byte*> MappedTransport::await_shards(BundleId id, Array array, int member) {
  const SharedBundle& b = bundle(id);
  await_published(b, {"E1", "gather", b.expert, ++gathers_[b.expert], id});
  const TensorView& shard = b.members[member][static_cast<size_t>(array)];
  const int64_t at = place(shard.raw(), shard.bytes());
  std::vector<const std::byte*> out;
  for (int r = 0; r < ranks(); ++r) out.push_back(locate(r, at));
  return out;
}

void MappedTransport::gather(const GatherJob& job, const Stream& lane) {
  check_gather(job);
  lane.run([=, this] { run_gather(job); });
}

void MappedTransport::run_gather(const GatherJob& job) {
  const SharedBundle& b = bundle(job.bundle);
  const GatherLayout& layout = job.landing->layout();
  const TraceSpan span(axis(), "gtp gather", {{"bytes", layout.received()}});
  await_published(b, {"E1", "gather", b.expert, ++gathers_[b.expert], b.id});
  std::vector<comm::ByteCopy> copies;
  for (const Plane& plane : layout.planes) {
    for (size_t e = 0; e < b.members.size(); ++e) {
      const TensorView& shard = b.members[e][static_cast<size_t>(plane.array)];
      const int64_t at = place(shard.raw(), shard.bytes());
      // The ranks begin at the next rank, so that they read from different ones.
      for (int i = 0; i < ranks(); ++i) {
        const int g = (rank() + i) % ranks();
        const TensorView to = job.landing->part(plane, g);
        auto* const bytes = static_cast<std::byte*>(to.raw());
        copies.push_back(
            {bytes + static_cast<int64_t>(e) * to.stride(0), locate(g, at), plane.bytes});
      }
    }
  }
  comm::copy_bytes(copies);
  received_.gathered += layout.received();
}

void MappedTransport::drain(const Stream& lane) {
  lane.run([this] { tell(kDrained, own(kDrained) + 1); });
}

void MappedTransport::await_drained(const Stream& stream) {
  if (!words_) return;
  stream.run([this] { await(kDrained, own(kDrained), {"E7", "drain"}); });
}

BundleSpec::Transfer MappedTransport::reduce_transfer(const ReduceShape& s) const {
  const int64_t shards = s.members * byte_size(s.wire, s.shard_rows * s.cols);
  return {shards * (ranks() - 1), shards * ranks(), 0};
}

void MappedTransport::check_send(BundleId id, const TensorView& send) const {
  MOIETY_CHECK(place(send.raw(), send.bytes()) >= 0,
               "gtp \"{}\": the send slot of bundle \"{}\" is not in memory that peers map", name(),
               bundle(id).name);
}

void MappedTransport::tell_exchange(int at, bool expert, uint64_t place,
                                    const Subject& subject) const {
  comm::store_relaxed(word(at, kPlace + expert, rank()), place);
  const auto words = std::bit_cast<std::array<uint64_t, 2>>(subject);
  for (int i = 0; i < 2; ++i) {
    comm::store_relaxed(word(at, kSubject + 2 * expert + i, rank()), words[i]);
  }
}

Subject MappedTransport::subject_of(int of, bool expert) const {
  std::array<uint64_t, 2> words;
  for (int i = 0; i < 2; ++i) {
    words[i] = comm::load_relaxed(word(rank(), kSubject + 2 * expert + i, of));
  }
  return std::bit_cast<Subject>(words);
}

void MappedTransport::exchange(const Subject& subject, const TensorView& send,
                               const std::function<void(std::span<std::byte* const> sends)>& read) {
  const BundleId id = subject.bundle;
  const bool expert = bundle(id).expert;
  const int produced = kProduced + expert, consumed = kConsumed + expert;
  const uint64_t k = own(produced) + 1;
  // Until then a peer may still look for the words of the exchange before.
  await(consumed, k - 1, {"E6", "reduce", expert, k - 1, id});
  const auto at = static_cast<uint64_t>(place(send.raw(), send.bytes()));
  for (int r = 0; r < ranks(); ++r) tell_exchange(r, expert, at, subject);
  tell(produced, k);
  await(produced, k, {"E4", "reduce", expert, k, id});
  std::vector<Subject> subjects;
  std::vector<std::byte*> sends;
  for (int r = 0; r < ranks(); ++r) {
    subjects.push_back(subject_of(r, expert));
    sends.push_back(
        locate(r, static_cast<int64_t>(comm::load_relaxed(word(rank(), kPlace + expert, r)))));
  }
  check_subjects(text("reduce {} on lane \"{} reduce\"", k, expert ? "expert" : "dense"), subjects);
  read(sends);
  tell(consumed, k);
}

void MappedTransport::reduce(const ReduceJob& job, const Stream& lane) {
  const ReduceShape s = check_reduce(job);
  check_send(job.bundle, job.send);
  lane.run([=, this] {
    const BundleSpec::Transfer transfer = reduce_transfer(s);
    const TraceSpan span(axis(), "gtp reduce", {{"bytes", transfer.received}});
    const int64_t shard = byte_size(s.wire, s.shard_rows * s.cols);
    exchange(gtp::subject_of(job), job.send, [&](std::span<std::byte* const> sends) {
      std::vector<std::byte*> chunks;
      for (std::byte* peer : sends) chunks.push_back(peer + rank() * shard);
      add_chunks(job, s, chunks, ranks() * shard);
    });
    received_.reduced += transfer.received;
  });
}

void MappedTransport::await_readers(bool expert, const Stream& stream) {
  stream.run([=, this] {
    const uint64_t k = own(kProduced + expert);
    await(kConsumed + expert, k, {"E6", "reduce", expert, k});
  });
}

}  // namespace moiety::gtp
