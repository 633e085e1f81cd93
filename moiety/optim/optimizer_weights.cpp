// Where the weights lie, and what changes and casts them.
#include <algorithm>

#include "moiety/base/error.h"
#include "moiety/optim/distributed_optimizer.h"

namespace moiety::optim {

// Takes shared memory for shards where needed. Collective over the peers that share weights.
void DistributedOptimizer::place_weights() {
  const auto bytes_of = [&](const Bucket& b) {
    return BucketWeights::bytes_needed(specs_, b.layout, config_.weights);
  };
  std::array<int64_t, 2> bytes{};
  casts_.clear();
  for (Bucket& b : buckets_) {
    b.weights.reset();
    if (b.shared) bytes[b.layout.expert] += bytes_of(b);
  }
  std::array<std::byte*, 2> next{};
  for (const bool expert : {false, true}) {
    shard_memory_[expert] = {};
    if (!peers_[expert].allocate || bytes[expert] == 0) continue;
    shard_memory_[expert] =
        peers_[expert].allocate(expert ? "expert shards" : "dense shards", bytes[expert]);
    next[expert] = static_cast<std::byte*>(shard_memory_[expert].memory.raw());
  }
  std::vector<BucketLayout> layouts;
  for (const Bucket& b : buckets_) layouts.push_back(b.layout);
  share(&DomainMemory::weights, "weights", layouts, [&](const BucketLayout& layout) {
    return BucketWeights::bytes_needed(specs_, layout, config_.weights);
  });
  for (Bucket& b : buckets_) {
    std::byte*& at = next[b.layout.expert];
    std::byte* const own = take(*b.domain, &DomainMemory::weights, bytes_of(b));
    b.weights = std::make_unique<BucketWeights>(specs_, b.layout, config_.weights, b.domain->rank(),
                                                config_.device, b.shared ? at : own);
    if (!b.frozen) b.weights->set_master(b.master);
    b.weights->bind(parameters_);
    if (b.shared && at) at += bytes_of(b);
  }
  make_updates();
  make_casts();
}

void DistributedOptimizer::make_updates() {
  updates_.clear();
  std::vector<AdamWArgs> segments;
  Update group;
  const auto close = [&] {
    if (segments.empty()) return;
    group.table = AdamWTable(segments, config_.device);
    updates_.push_back(std::move(group));
    segments.clear();
    group = {};
  };
  for (const size_t i : forward_) {
    const Bucket& b = buckets_[i];
    if (b.frozen) continue;
    segments.push_back({.grad = b.gradients->sum(),
                        .master = b.master,
                        .exp_avg = b.moments.select(0),
                        .exp_avg_sq = b.moments.select(1),
                        .weight = b.weights->own_storage(),
                        .runs = b.runs});
    group.buckets.push_back(i);
    group.elements += b.layout.segment();
    if (lane_ && group.elements >= config_.group_elements) close();
  }
  close();
  find_late();
  // The smallest group first, so that something travels soon; the largest before others, so that
  // little is left to travel behind the last one. Late ones come behind them, so that nothing is.
  const auto late = std::stable_partition(updates_.begin(), updates_.end(),
                                          [](const Update& u) { return !u.late; });
  std::stable_sort(updates_.begin(), late,
                   [](const Update& a, const Update& b) { return a.elements > b.elements; });
  if (late != updates_.begin()) std::rotate(updates_.begin(), late - 1, late);
}

// As many elements travel beside the update as half of those that it changes: beside it links are
// half as fast as beside products, and a weight then takes about as long to travel as to be changed.
void DistributedOptimizer::find_late() {
  late_.clear();
  if (!lane_ || !config_.late_weights) return;
  int64_t all = 0, travel = 0;
  for (const Update& u : updates_) all += u.elements;
  for (Update& u : updates_) {
    u.late = travel > all / 2;
    for (const size_t i : u.buckets) {
      const Bucket& b = buckets_[i];
      if (!travels_on_lane(b)) continue;
      travel += b.layout.segment() * (b.domain->size() - 1);
      if (u.late) late_.push_back(i);
    }
  }
}

// A ticket is complete at once where there is a lane.
void DistributedOptimizer::gather_on(const Bucket& bucket, const Stream& stream) const {
  std::vector<comm::Ticket> complete;
  bucket.weights->gather(*bucket.domain, complete, stream);
}

void DistributedOptimizer::begin_forward(const Stream& stream) {
  awaited_ = 0;
  if (late_.empty()) return;
  fork(stream);
  for (const size_t i : late_) {
    gather_on(buckets_[i], lane_->stream());
    buckets_[i].published.record(lane_->stream());
  }
  begun_ = true;
}

// The parameters of a bucket are in reverse order, and the lane brings the buckets one by one.
void DistributedOptimizer::await_weights(int end, const Stream& stream) {
  const size_t before = awaited_;
  while (awaited_ < late_.size() && buckets_[late_[awaited_]].layout.slots.back().parameter < end) {
    ++awaited_;
  }
  if (awaited_ > before) stand(buckets_[late_[awaited_ - 1]].published, stream);
}

void DistributedOptimizer::complete_weights(const Stream& stream) {
  for (const size_t i : late_) gather_on(buckets_[i], stream);
}

// One cast for all trained buckets of a domain, and one for all frozen ones.
void DistributedOptimizer::make_casts() {
  struct Group {
    const Bucket* first;
    std::vector<BucketWeights*> buckets;
  };
  std::vector<Group> groups;
  for (const size_t i : forward_) {
    const Bucket& b = buckets_[i];
    if (b.weights->cast_items().empty()) continue;
    const auto at = std::find_if(groups.begin(), groups.end(), [&](const Group& g) {
      return g.first->domain == b.domain && g.first->holders == b.holders &&
             g.first->layout.frozen == b.layout.frozen;
    });
    Group& group = at != groups.end() ? *at : groups.emplace_back(Group{&b, {}});
    group.buckets.push_back(b.weights.get());
  }
  for (Group& g : groups) {
    casts_.push_back({g.first->layout.frozen, WeightCast(std::move(g.buckets), *g.first->domain,
                                                         *g.first->holders, config_.device)});
    if (!casts_.back().frozen) casts_.back().weights.set_masters();
  }
}

void DistributedOptimizer::cast_weights(bool all, Stream stream) {
  for (Cast& cast : casts_) {
    if (cast.frozen && !all) continue;
    if (cast.frozen) cast.weights.set_masters();
    cast.weights.begin(stream);
  }
  for (Cast& cast : casts_) {
    if (!cast.frozen || all) cast.weights.finish(stream);
  }
}

}  // namespace moiety::optim
