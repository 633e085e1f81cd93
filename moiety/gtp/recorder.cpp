#include "moiety/gtp/recorder.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <type_traits>

#include "moiety/base/error.h"
#include "moiety/gtp/hash.h"

namespace moiety::gtp {
namespace {

constexpr size_t kBlock = 256;        // events that are compared by one hash
constexpr size_t kMostBlocks = 8000;  // blocks that one all-gather takes: two million events

template <class T>
std::string bytes_of(const std::vector<T>& items) {
  return {reinterpret_cast<const char*>(items.data()), items.size() * sizeof(T)};
}

template <class T>
std::vector<T> items_of(const std::string& bytes) {
  std::vector<T> out(bytes.size() / sizeof(T));
  if (!out.empty()) std::memcpy(out.data(), bytes.data(), out.size() * sizeof(T));
  return out;
}

// An event without the gaps of its type.
struct PackedEvent {
  int32_t kind, bundle, same_call;
  uint32_t work;
  friend bool operator==(const PackedEvent&, const PackedEvent&) = default;
};
PackedEvent pack(const TraceEvent& e) {
  return {static_cast<int32_t>(e.kind), e.bundle, e.same_call, std::bit_cast<uint32_t>(e.work_ns)};
}

std::span<const TraceEvent> block_of(std::span<const TraceEvent> trace, size_t block) {
  const size_t begin = std::min(block * kBlock, trace.size());
  return trace.subspan(begin, std::min(kBlock, trace.size() - begin));
}

uint64_t hash_of(std::span<const TraceEvent> events) {
  Hash h;
  for (const TraceEvent& e : events) {
    const PackedEvent p = pack(e);
    h.add(p.kind, p.bundle, p.same_call, p.work);
  }
  return h.value();
}

std::string event_text(const std::vector<PackedEvent>& events, size_t i) {
  if (i >= events.size()) return "nothing";
  const PackedEvent& e = events[i];
  const Kind kind = static_cast<Kind>(e.kind);
  std::string out = name(kind);
  if (names_bundle(kind)) out += text(" of bundle {}", e.bundle);
  if (e.same_call) out += " in the same call";
  return out + text(", {} ns", std::bit_cast<float>(e.work));
}

// The first rank whose item differs from rank 0's; 0 if none does.
int first_other(const std::vector<std::string>& items) {
  for (size_t r = 1; r < items.size(); ++r) {
    if (items[r] != items[0]) return static_cast<int>(r);
  }
  return 0;
}

// The first block in which any rank's trace differs from rank 0's.
size_t first_different_block(comm::Bootstrap& bootstrap, std::span<const TraceEvent> trace) {
  std::vector<uint64_t> hashes;
  for (size_t b = 0; b < kMostBlocks && b * kBlock < trace.size(); ++b) {
    hashes.push_back(hash_of(block_of(trace, b)));
  }
  const auto all = bootstrap.all_gather(bytes_of(hashes));
  const auto zero = items_of<uint64_t>(all[0]);
  size_t first = kMostBlocks;
  for (const std::string& bytes : all) {
    const auto theirs = items_of<uint64_t>(bytes);
    const auto at = std::mismatch(zero.begin(), zero.end(), theirs.begin(), theirs.end());
    const bool equal = at.first == zero.end() && at.second == theirs.end();
    if (!equal) first = std::min(first, static_cast<size_t>(at.first - zero.begin()));
  }
  return first;
}

}  // namespace

void Recorder::begin(std::span<const TraceEvent> calls) {
  events_.assign(calls.begin(), calls.end());
  if (events_.empty()) events_.push_back({});
}

void Recorder::call(Kind kind, std::span<const BundleId> bundles, Work work) {
  MOIETY_CHECK(!events_.empty() && events_.back().kind != Kind::kFlush,
               "gtp recorder: {} outside of a step", name(kind));
  const size_t expected = kind == Kind::kCut ? 0 : is_consume(kind) ? bundles.size() : 1;
  MOIETY_CHECK((names_bundle(kind) || kind == Kind::kCut) && bundles.size() == expected &&
                   (kind == Kind::kCut || !bundles.empty()),
               "gtp recorder: {} of {} bundles", name(kind), bundles.size());
  const size_t first = events_.size();
  if (kind == Kind::kCut) events_.push_back({kind, kNoBundle, false, 0});
  for (const BundleId b : bundles) events_.push_back({kind, b, events_.size() > first, 0});
  note_work(work);
}

void Recorder::note_work(Work work) {
  MOIETY_CHECK(!events_.empty(), "gtp recorder: work outside of a step");
  events_.back().work_ns += time_of(work);
}

std::span<const TraceEvent> Recorder::seal() {
  MOIETY_CHECK(!events_.empty() && events_.back().kind != Kind::kFlush,
               "gtp recorder: flush outside of a step");
  events_.push_back({Kind::kFlush, kNoBundle, false, 0});
  return events_;
}

float Recorder::time_of(Work work) const {
  return static_cast<float>(
      std::max(work.flops / policy_.flops_per_ns, work.bytes / policy_.memory_bytes_per_ns) +
      work.received / policy_.bytes_per_ns);
}

static_assert(std::is_trivially_copyable_v<Policy>);

Policy agree_policy(comm::Bootstrap& bootstrap, const Policy& policy) {
  const auto all = bootstrap.all_gather(bytes_of(std::vector{policy}));
  MOIETY_CHECK(all[0].size() == sizeof(Policy), "gtp policy: rank 0 sent {} bytes, expected {}",
               all[0].size(), sizeof(Policy));
  return items_of<Policy>(all[0])[0];
}

void compare_traces(comm::Bootstrap& bootstrap, std::string_view step,
                    std::span<const TraceEvent> trace) {
  const std::vector<uint64_t> whole{trace.size(), hash_of(trace)};
  if (first_other(bootstrap.all_gather(bytes_of(whole))) == 0) return;
  const size_t block = first_different_block(bootstrap, trace);
  std::vector<PackedEvent> mine;
  for (const TraceEvent& e : block_of(trace, block)) mine.push_back(pack(e));
  const auto all = bootstrap.all_gather(bytes_of(mine));
  const int other = first_other(all);
  const auto zero = items_of<PackedEvent>(all[0]), theirs = items_of<PackedEvent>(all[other]);
  const auto at = std::mismatch(zero.begin(), zero.end(), theirs.begin(), theirs.end());
  const auto i = static_cast<size_t>(at.first - zero.begin());
  fail(ErrorKind::kInvalidArgument,
       "gtp: the traces of step {} differ in events {} to {}: event {} is {} on rank 0, {} on rank "
       "{}",
       step, block * kBlock, (block + 1) * kBlock - 1, block * kBlock + i, event_text(zero, i),
       event_text(theirs, i), other);
}

}  // namespace moiety::gtp
