// Stages 1 and 2: the list of gathers.
#include <algorithm>
#include <tuple>

#include "moiety/gtp/plan_stages.h"

namespace moiety::gtp {
namespace {

// Bytes kept at each position; sums over ranges and their maximum in logarithmic time.
class Profile {
 public:
  explicit Profile(int32_t positions) {
    while (size_ < positions) size_ *= 2;
    added_.resize(2 * size_);
    highest_.resize(2 * size_);
  }

  int64_t highest(int32_t begin, int32_t end) const { return highest(1, 0, size_, begin, end); }
  void add(int32_t begin, int32_t end, int64_t bytes) { add(1, 0, size_, begin, end, bytes); }

 private:
  int64_t highest(int32_t node, int32_t low, int32_t high, int32_t begin, int32_t end) const {
    if (end <= low || high <= begin) return 0;
    if (begin <= low && high <= end) return highest_[node];
    const int32_t middle = (low + high) / 2;
    return added_[node] + std::max(highest(2 * node, low, middle, begin, end),
                                   highest(2 * node + 1, middle, high, begin, end));
  }
  void add(int32_t node, int32_t low, int32_t high, int32_t begin, int32_t end, int64_t bytes) {
    if (end <= low || high <= begin) return;
    if (begin <= low && high <= end) {
      added_[node] += bytes;
      highest_[node] += bytes;
      return;
    }
    const int32_t middle = (low + high) / 2;
    add(2 * node, low, middle, begin, end, bytes);
    add(2 * node + 1, middle, high, begin, end, bytes);
    highest_[node] = added_[node] + std::max(highest_[2 * node], highest_[2 * node + 1]);
  }

  int32_t size_ = 1;
  std::vector<int64_t> added_, highest_;  // per node: added to all of it; highest at or below it
};

}  // namespace

std::vector<Use> demand(const Problem& problem) {
  std::vector<Use> uses;
  for (int32_t p = 0; p < problem.time.positions; ++p) {
    for (const TraceEvent& e : problem.time.call(p)) {
      if (!is_consume(e.kind) || problem.bundles[e.bundle].group_size == 1) continue;
      const Views view = problem.bundles[e.bundle].view_of(e.kind);
      const bool col = view == kColView && !problem.bundles[e.bundle].one_payload;
      uses.push_back({e.bundle, col ? Payload::kCol : Payload::kRow, view, p, kNone});
    }
  }
  std::sort(uses.begin(), uses.end(), [](const Use& a, const Use& b) {
    return std::tie(a.position, a.bundle) < std::tie(b.position, b.bundle);
  });
  std::vector<int32_t> latest(2 * problem.bundles.size(), kNone);
  for (size_t i = 0; i < uses.size(); ++i) {
    int32_t& before = latest[2 * uses[i].bundle + static_cast<int>(uses[i].payload)];
    if (before != kNone) uses[before].next = static_cast<int32_t>(i);
    before = static_cast<int32_t>(i);
  }
  return uses;
}

std::vector<int32_t> coalesce(const Problem& problem, std::span<const Use> uses) {
  const Timeline& time = problem.time;
  std::vector<int32_t> candidates;
  const auto span = [&](int32_t i) { return uses[uses[i].next].position - uses[i].position; };
  for (int32_t i = 0; i < static_cast<int32_t>(uses.size()); ++i) {
    if (uses[i].next == kNone || span(i) > problem.policy.keep_span) continue;
    const int32_t u = uses[i].position, v = uses[uses[i].next].position;
    if (problem.policy.cross_cuts || time.segment[u] == time.segment[v]) candidates.push_back(i);
  }
  // `uses` are already ordered by position and bundle.
  std::stable_sort(candidates.begin(), candidates.end(),
                   [&](int32_t a, int32_t b) { return span(a) < span(b); });
  Profile held(time.positions);
  std::vector<int32_t> kept;
  for (const int32_t i : candidates) {
    const Use &a = uses[i], &b = uses[a.next];
    const int64_t bytes = problem.bundles[a.bundle].gather_of(a.view | b.view).slot;
    if (held.highest(a.position, b.position) + bytes > problem.policy.keep_bytes) continue;
    held.add(a.position, b.position, bytes);
    kept.push_back(i);
  }
  return kept;
}

std::vector<Gather> gathers_of(std::span<const Use> uses, std::span<const int32_t> kept,
                               std::vector<int32_t>& gather_of) {
  gather_of.assign(uses.size(), kNone);
  std::vector<bool> keeps(uses.size());
  for (const int32_t i : kept) keeps[i] = true;
  std::vector<Gather> gathers;
  for (size_t i = 0; i < uses.size(); ++i) {
    const Use& use = uses[i];
    if (gather_of[i] == kNone) {
      gather_of[i] = static_cast<int32_t>(gathers.size());
      Gather g;
      g.bundle = use.bundle;
      g.payload = use.payload;
      g.first_use = use.position;
      gathers.push_back(g);
    }
    Gather& g = gathers[gather_of[i]];
    g.views |= use.view;
    g.last_use = use.position;
    if (keeps[i]) gather_of[use.next] = gather_of[i];
  }
  return gathers;
}

}  // namespace moiety::gtp
